"""`make aws-day`: compares what the sandbox, the cost ledger and the documentation assume of SageMaker with an account."""
