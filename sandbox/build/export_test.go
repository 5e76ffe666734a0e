package build

import (
	"testing"

	"github.com/drowse-vm/drowse/sandbox"
)

// Hold begins a build that lasts until the test ends, and returns its name.
func Hold(t *testing.T, s *sandbox.Host) string {
	t.Helper()
	name, lock, err := begin(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lock.Close() })
	return name
}
