// LangChain: an agent whose tool is a sandbox.
import { ChatOpenAI } from '@langchain/openai'
import { Sandbox } from 'e2b'
import { createAgent, tool } from 'langchain'
import { z } from 'zod'

const sandbox = await Sandbox.create('base')
const shell = tool(async ({ command }) => (await sandbox.commands.run(command)).stdout, {
  name: 'shell', description: 'Runs a command in a Linux sandbox, and returns its output.',
  schema: z.object({ command: z.string() })
})
try {
  const model = new ChatOpenAI({ model: process.env.MODEL, configuration: { baseURL: process.env.OPENAI_BASE_URL } })
  const agent = createAgent({ model, tools: [shell] })
  const { messages } = await agent.invoke({ messages: [{ role: 'user', content: 'What is 6 times 7?' }] })
  console.log(messages.at(-1).content)
} finally { await sandbox.kill() }
