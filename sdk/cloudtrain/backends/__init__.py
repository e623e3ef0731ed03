"""Where runs run. Backends do not know each other; `registry` names them."""
