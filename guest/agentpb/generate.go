// Package agentpb is the protocol between the host and the agent inside a VM:
// the generated messages and ttrpc stubs, and the limits both ends hold to.
//
// The generators are pinned as tools in go.mod (google.golang.org/protobuf
// v1.36.11 and github.com/containerd/ttrpc v1.2.10); protoc 3.21.12 was used.
package agentpb

//go:generate sh -c "protoc --plugin=protoc-gen-go=$(go tool -n protoc-gen-go) --plugin=protoc-gen-go-ttrpc=$(go tool -n protoc-gen-go-ttrpc) --go_out=. --go_opt=paths=source_relative --go-ttrpc_out=. --go-ttrpc_opt=paths=source_relative agent.proto"
