// Vercel AI SDK: a tool that is a sandbox.
import { createOpenAI } from '@ai-sdk/openai'
import { generateText, stepCountIs, tool } from 'ai'
import { Sandbox } from 'e2b'
import { z } from 'zod'

const sandbox = await Sandbox.create('base')
const shell = tool({
  description: 'Runs a command in a Linux sandbox, and returns its output.',
  inputSchema: z.object({ command: z.string() }),
  execute: async ({ command }) => (await sandbox.commands.run(command)).stdout
})
try {
  const model = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL }).chat(process.env.MODEL)
  console.log((await generateText({ model, tools: { shell }, stopWhen: stepCountIs(5), prompt: 'What is 6 times 7?' })).text)
} finally { await sandbox.kill() }
