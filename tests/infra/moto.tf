# Tests copy this file into a root module. The endpoint and the credentials come from AWS_ENDPOINT_URL and other AWS_ variables.

provider "aws" {
  s3_use_path_style = true # names of buckets do not resolve on loopback
  max_retries       = 2
}
