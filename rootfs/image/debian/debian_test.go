package debian

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/rootfs/image/fstree"
)

func TestMessages_keep_the_last_errors_and_bound_lines(t *testing.T) {
	var log bytes.Buffer
	m := &messages{log: &log}
	for i := range 100 {
		fmt.Fprintf(m, "line %d\n%s", i, strings.Repeat("E", 3))
		fmt.Fprintf(m, ": error %d\r\n", i)
	}
	fmt.Fprint(m, strings.Repeat("z", 10*maxMessageLine))
	if !strings.HasSuffix(m.last(), "error 99") {
		t.Errorf("last: %q", m.last())
	}
	fmt.Fprintln(m)
	if n := len(m.tail[len(m.tail)-1]); n != maxMessageLine || len(m.tail) > maxMessageLines || len(m.worse) > maxMessageLines {
		t.Errorf("it keeps %d bytes of a line, %d and %d lines", n, len(m.tail), len(m.worse))
	}
	if log.Len() < 10*maxMessageLine {
		t.Errorf("the log has %d bytes only", log.Len())
	}
}

func TestDebian_trim_leaves_what_is_needed(t *testing.T) {
	names := []string{
		"var/lib/apt/lists/x_Packages", "var/cache/apt/pkgcache.bin", "var/cache/apt/archives/x.deb", "var/lib/dpkg/status-old",
		"etc/apt/apt.conf.d/99mmdebstrap", "var/log/dpkg.log", "tmp/x", "run/x", // removed
		"var/lib/apt/lists/partial/", "var/cache/apt/archives/partial/", "run/lock/", "var/lib/dpkg/status",
		"etc/apt/apt.conf.d/70debconf", "var/log/lastlog", // kept
		"usr/share/doc/p/changelog.gz", "usr/share/man/man1/p.1.gz", // removed with noDocs
		"usr/share/doc/p/copyright",
	}
	gone, docs := names[:8], names[14:16]
	for _, noDocs := range []bool{false, true} {
		tr := fstree.New()
		for _, n := range names {
			i := &fstree.Inode{Mode: 0o644}
			if strings.HasSuffix(n, "/") {
				i.Mode = os.ModeDir | 0o755
			}
			if err := tr.Add(n, i); err != nil {
				t.Fatal(err)
			}
		}
		debianTrim(tr, noDocs)
		for i, n := range names {
			want := i >= len(gone) && (!noDocs || (n != docs[0] && n != docs[1]))
			if got := tr.Lookup(n) != nil; got != want {
				t.Errorf("noDocs %v: %s is there: %v, want %v", noDocs, n, got, want)
			}
		}
	}
}
