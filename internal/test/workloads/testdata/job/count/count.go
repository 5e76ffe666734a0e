// Package count counts.
package count

// Version is what the test changes.
const Version = "v1"

var n int

// Next is one more than the last time.
func Next() int {
	n++
	return n
}
