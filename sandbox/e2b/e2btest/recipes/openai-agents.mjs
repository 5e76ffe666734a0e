// OpenAI Agents SDK: the agent's tool is a sandbox. The client of E2B finds drowse by E2B_API_KEY and the two URLs.
import { Agent, run, setOpenAIAPI, setTracingDisabled, tool } from '@openai/agents'
import { Sandbox } from 'e2b'
import { z } from 'zod'

setTracingDisabled(true)
setOpenAIAPI('chat_completions') // a server of its own, or leave it out for OpenAI's
const sandbox = await Sandbox.create('base')
const shell = tool({
  name: 'shell', description: 'Runs a command in a Linux sandbox, and returns its output.',
  parameters: z.object({ command: z.string() }),
  execute: async ({ command }) => (await sandbox.commands.run(command)).stdout
})
try {
  const agent = new Agent({ name: 'coder', model: process.env.MODEL, instructions: 'Use the sandbox.', tools: [shell] })
  console.log((await run(agent, 'What is 6 times 7?')).finalOutput)
} finally { await sandbox.kill() }
