"""What each version of cloudtrain has written, for tests that later versions read it: a folder by version."""
