// Asks @cloud-copilot/iam-simulate, which knows AWS's Service Authorization Reference, what policies allow.
//
//   node simulate.mjs FOLDER < cases.json     FOLDER has its node_modules
//
// Each case: {policies: [document], own: the resource's policy or null, action, resource, context}. Each answer: `allowed`, `implicitDeny`, `explicitDeny`,
// or what is wrong with the case: an action, a resource or a condition key that AWS does not have.

import { createRequire } from 'node:module'
import { readFileSync } from 'node:fs'
import { pathToFileURL } from 'node:url'

const find = createRequire(`${process.argv[2]}/package.json`)
const { runSimulation } = await import(pathToFileURL(find.resolve('@cloud-copilot/iam-simulate')))
const words = { Allowed: 'allowed', ImplicitlyDenied: 'implicitDeny', ExplicitlyDenied: 'explicitDeny' }

async function answer({ policies, own, action, resource, context }) {
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
  return ignored.length ? `no keys of this action: ${ignored}` : words[response.overallResult]
}

const answers = []
for (const each of JSON.parse(readFileSync(0, 'utf8'))) answers.push(await answer(each))
console.log(JSON.stringify(answers))
