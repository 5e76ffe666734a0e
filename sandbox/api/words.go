package api

import "github.com/drowse-vm/drowse/sandbox/records"

// requests translate the Go names in error texts into HTTP requests. $1 is a name.
var requests = records.NewWords([][2]string{
	{`Sandbox\("([^"]+)"\)\.Start with DiscardMemory`, "`drowse start --discard-memory $1` on the host"},
	{`Sandbox\("([^"]+)"\)\.Start\b`, "POST /v1/sandboxes/$1/start"},
	{`Sandbox\("([^"]+)"\)\.Wake\b`, "POST /v1/sandboxes/$1/wake"},
	{`Sandbox\("([^"]+)"\)\.Delete\b`, "DELETE /v1/sandboxes/$1"},
	{`Sandbox\("([^"]+)"\)\.Snapshot\b`, "POST /v1/sandboxes/$1/snapshot"},
	{`Fleet\.Update of "([^"]+)" with [\w.]+`, "PATCH /v1/sandboxes/$1"},
	{`(Host|Fleet)\.List\b`, "GET /v1/sandboxes"},
	{`Fleet\.Prune\b`, "POST /v1/prune"},
	{`Limits\.Write\b`, "`drowse limits` on the host"},
	{`Store\.Snapshots\b`, "GET /v1/snapshots"},
	{`image\.List\b`, "GET /v1/images"},
	{`Store\.ConsoleLog\b`, "GET /v1/sandboxes/NAME/console"},
}...)
