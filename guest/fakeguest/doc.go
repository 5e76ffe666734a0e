// Package fakeguest is a guest in memory for tests: the agent's protocol behind a Unix socket, with commands that
// are Go functions, and files in memory. Nothing runs or changes on the host.
//
// It supports what tests of programs need: commands, files, copies of trees and watches of them, services that run
// nothing, forwarded connections, statistics, hooks (there are none), freezing, shutting down. To other calls of
// agentpb.AgentService it answers like an older agent without them.
package fakeguest
