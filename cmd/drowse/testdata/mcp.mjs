// A client of `drowse mcp`, with the npm package @modelcontextprotocol/sdk as it is. Arguments: the server's command.
import assert from "node:assert/strict";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StdioClientTransport } from "@modelcontextprotocol/sdk/client/stdio.js";

const [command, ...args] = process.argv.slice(2);
const client = new Client({ name: "test", version: "1" });
await client.connect(new StdioClientTransport({ command, args, env: process.env }));
assert.equal(client.getServerVersion().name, "drowse");

// The client checks results against the output schemas of the tools that it has listed.
const { tools } = await client.listTools();
assert.equal(tools.length, 14);
for (const tool of tools) assert.equal(tool.outputSchema.type, "object", tool.name);

const heard = [];
const call = async (name, args) => {
  const result = await client.callTool({ name, arguments: args }, undefined, { onprogress: (p) => heard.push(p.message) });
  return result.isError ? { error: result.content[0].text } : result.structuredContent;
};
const made = await call("create_sandbox", { name: "node", memory_mib: 64 });
assert.equal(made.status, "running", JSON.stringify(made));
assert.ok(heard.includes("boot"), heard.join());
assert.equal((await call("exec", { sandbox: "node", command: ["echo", "<hi>"] })).stdout, "<hi>\n");
assert.equal((await call("exec", { sandbox: "node", command: ["false"] })).exit_code, 1);
await call("write_file", { sandbox: "node", path: "/root/a", content: "\u00e4" });
assert.equal((await call("sleep_sandbox", { sandbox: "node" })).status, "asleep");
assert.equal((await call("read_file", { sandbox: "node", path: "/root/a" })).content, "\u00e4");
assert.equal((await call("list_dir", { sandbox: "node", path: "/root" })).total, 1);
assert.equal((await call("stat_file", { sandbox: "node", path: "/root/a" })).size, 2);
assert.equal((await call("fork_sandbox", { sandbox: "node" })).sandboxes.length, 1);
assert.equal((await call("list_sandboxes", {})).sandboxes.length, 2);
const policy = await call("get_policy", { sandbox: "node" });
assert.equal(policy.default, "deny", JSON.stringify(policy));
assert.deepEqual((await call("set_policy", { sandbox: "node", allow: [] })).allow, []);
assert.deepEqual((await call("list_ports", { sandbox: "node" })).ports, []);
assert.equal((await call("remove_file", { sandbox: "node", path: "/root/a" })).removed, "/root/a");
assert.match((await call("exec", { sandbox: "other", command: ["true"] })).error, /list_sandboxes/);
assert.match((await call("exec", { sandbox: "node", command: "ls" })).error, /command/);
const canceled = new AbortController();
setTimeout(() => canceled.abort(), 100);
await assert.rejects(client.callTool({ name: "exec", arguments: { sandbox: "node", command: ["sleep", "600"] } }, undefined, { signal: canceled.signal }));
assert.equal((await call("delete_sandbox", { sandbox: "node" })).deleted, "node");
await client.close();
console.log("ok");
