package agentpb

import (
	"strings"
)

// Cut returns at most about n bytes of s as valid UTF-8, which protobuf messages require.
func Cut(s string, n int) string {
	return strings.ToValidUTF8(s[:min(len(s), n)], "?")
}
