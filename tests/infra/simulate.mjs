// Evaluates policies with @cloud-copilot/iam-simulate, which contains AWS's Service Authorization Reference.
//
//   node simulate.mjs FOLDER < cases.json     FOLDER contains node_modules
//
// Each case is {policies: [document], own: the resource's policy or null, action, resource, context}. The result of each
// case is `allowed`, `implicitDeny`, `explicitDeny`, or an error: AWS has no such action, resource or condition key.

import { createRequire } from 'node:module'
import { readFileSync } from 'node:fs'
import { pathToFileURL } from 'node:url'

const find = createRequire(`${process.argv[2]}/package.json`)
const { runSimulation } = await import(pathToFileURL(find.resolve('@cloud-copilot/iam-simulate')))
const words = { Allowed: 'allowed', ImplicitlyDenied: 'implicitDeny', ExplicitlyDenied: 'explicitDeny' }

async function evaluate({ policies, own, action, resource, context }) {
  const response = await runSimulation(
    {
      identityPolicies: policies.map((policy, index) => ({ name: `${index}`, policy })),
      serviceControlPolicies: [],
      resourceControlPolicies: [],
      resourcePolicy: own ?? undefined,
      request: {
        action,
        principal: 'arn:aws:iam::123456789012:user/ada',
        resource: { resource, accountId: '123456789012' },
        contextVariables: context
      }
    },
    {}
  )
  if (response.resultType === 'error') return JSON.stringify(response.errors)
  const ignored = response.result?.ignoredContextKeys ?? []
  return ignored.length ? `this action has no keys ${ignored}` : words[response.overallResult]
}

const results = []
for (const each of JSON.parse(readFileSync(0, 'utf8'))) results.push(await evaluate(each))
console.log(JSON.stringify(results))
