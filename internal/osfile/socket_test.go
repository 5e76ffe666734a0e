package osfile

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

func TestListenUnix_makes_a_socket_that_only_its_owner_may_use(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "s")
	for range 2 { // the second time one is there that nobody serves
		l, err := ListenUnix(path)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if st, err := os.Stat(path); err != nil || st.Mode() != fs.ModeSocket|0o600 {
			t.Errorf("its mode is %v, %v", st.Mode(), err)
		}
	}
}
