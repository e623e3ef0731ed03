"""What the account knows and this machine does not: asked before a submit pays for the answer."""
