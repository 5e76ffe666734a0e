package sandbox

import "testing"

// HoldBuild begins a build that is under way until the test ends, and gives its name.
func HoldBuild(t *testing.T, s *Store) string {
	t.Helper()
	name, lock, err := s.newBuild()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lock.Close() })
	return name
}
