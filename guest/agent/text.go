package agent

import "strings"

// cut shortens a text, for a message that must be valid UTF-8.
func cut(s string, n int) string {
	return strings.ToValidUTF8(s[:min(len(s), n)], "?")
}
