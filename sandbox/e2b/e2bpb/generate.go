// Package e2bpb has the generated code of the two services that clients of E2B's wire call in a sandbox.
//
// The generators are pinned as tools in go.mod (google.golang.org/protobuf and connectrpc.com/connect); protoc 3.21.12
// was used.
package e2bpb

//go:generate sh -c "protoc --plugin=protoc-gen-go=$(go tool -n protoc-gen-go) --plugin=protoc-gen-connect-go=$(go tool -n protoc-gen-connect-go) --go_out=. --go_opt=paths=source_relative --connect-go_out=. --connect-go_opt=paths=source_relative,simple,package_suffix= process/process.proto filesystem/filesystem.proto"
