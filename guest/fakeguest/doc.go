// Package fakeguest is a guest in memory for tests: the agent's protocol behind a Unix socket, with commands that
// are Go functions, and files in memory. Nothing runs or changes on the host.
//
// It supports what tests of programs need: commands, files and copies of trees, statistics, hooks (there are none),
// freezing, shutting down. To other calls of agentpb.AgentService, such as services, watches and forwarded
// connections, it answers like an older agent without them.
package fakeguest
