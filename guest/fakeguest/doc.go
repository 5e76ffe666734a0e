// Package fakeguest has a guest in memory for tests: the agent's protocol behind a Unix socket, commands that are
// functions of Go, and files that are in memory. Nothing runs or changes on the host.
//
// It answers what tests of programs need: commands, files and copies of trees, statistics, hooks (there are none),
// freezing, shutting down. Of the rest of agentpb.AgentService, such as services, watches and forwarded connections, it
// says that it is an older agent, which has it not.
package fakeguest
