# Laid beside a root module by the tests. Where AWS is, and who asks, the environment tells: AWS_ENDPOINT_URL and the rest.

provider "aws" {
  s3_use_path_style = true # buckets have no names of hosts on loopback
  max_retries       = 2
}
