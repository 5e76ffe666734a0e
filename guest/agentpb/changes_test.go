package agentpb

import "testing"

func TestCompare_paths_orders_as_a_walk_does(t *testing.T) {
	paths := []string{"a", "a/b", "a/b/c", "a/b-", "a!", "a-", "a-/x", "a0", "b"}
	for i := range paths {
		for k := range paths {
			got, want := ComparePaths(paths[i], paths[k]), i-k
			if (got < 0) != (want < 0) || (got == 0) != (want == 0) {
				t.Errorf("%q and %q: %d", paths[i], paths[k], got)
			}
		}
	}
}
