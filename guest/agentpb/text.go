package agentpb

import (
	"strings"
)

// Cut shortens a text, for a message that must be valid UTF-8.
func Cut(s string, n int) string {
	return strings.ToValidUTF8(s[:min(len(s), n)], "?")
}
