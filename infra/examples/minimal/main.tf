# The module with its defaults: a network, a bucket, a role, policies, a budget and alarms.

module "cloudtrain" {
  source = "../.."

  budget_usd   = 2000
  alert_emails = ["training@example.com"]
}
