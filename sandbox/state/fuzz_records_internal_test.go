package state

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// A decoded record survives encoding, and a sweep finds each id in a record that another build cannot read.
func FuzzRecord(f *testing.F) {
	id, other := strings.Repeat("0123456789abcdef", 2), strings.Repeat("fedcba9876543210", 2)
	whole, err := EncodeRecord(&Record{
		Version: RecordVersion, ID: id, Spec: spec.VM{Name: "a", Image: "debian"}, Created: time.Unix(1e9, 0).UTC(), Phase: Asleep,
		Disk: disk.Stack{Layers: []string{id + "-1", other + "-2"}}, Snapshot: other, Previous: id, Fork: &Origin{Parent: "p", ParentID: other},
	})
	if err != nil {
		f.Fatal(err)
	}
	for _, s := range [][]byte{whole, whole[:len(whole)/2], []byte("{}"), []byte(`{"version":1,"disk":{"layers":["../x"]}}`), []byte(`{"version":9}`), nil} {
		f.Add(s)
	}
	path := filepath.Join(f.TempDir(), "vm.json")
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := DecodeRecord(data)
		if err != nil {
			return
		}
		text, err := EncodeRecord(r)
		if err != nil {
			return // a time beyond the year 9999
		}
		again, err := DecodeRecord(text)
		if err != nil {
			t.Fatalf("%q is written as %q, which is refused: %v", data, text, err)
		}
		if twice, err := EncodeRecord(again); err != nil || !bytes.Equal(twice, text) {
			t.Fatalf("%q is written as %q and then as %q (%v)", data, text, twice, err)
		}
		s := &Store{dir: filepath.Dir(path)}
		if st, err := s.Absolute(r.Disk); err == nil {
			for _, l := range st.Layers {
				if filepath.Dir(l) != s.LayerDir() {
					t.Fatalf("layer %q is outside of the store", l)
				}
			}
		}
		if len(text) > maxGuess {
			return
		}
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		found := idsIn(path)
		for _, named := range append([]string{r.ID, r.Snapshot, r.Previous, r.Base, r.Parent}, r.Disk.Layers...) {
			owner, _, _ := strings.Cut(named, "-")
			if IDPattern.MatchString(owner) && !slices.Contains(found, owner) {
				t.Fatalf("a sweep does not see %q in %q", owner, text)
			}
		}
	})
}

// Accepted metadata keeps its bounds and is the same when it is written and read again.
func FuzzMetadataFile(f *testing.F) {
	for _, s := range []string{
		"", "{}", `{"version":1}`, `{"version":2}`, `{"version":1,"class":"resumable","owner":"a","tags":["x"],"expires":"2026-11-22T12:00:00Z","keep":{"last":1}}`,
		`{"version":1,"wake":{"at":"2026-11-22T12:00:00Z","every_seconds":60},"rotate":{"to":"0123"},"persist":{"drop":["/tmp"],"promote":[{"path":"/a","to":"/b"}],"max_bytes":1}}`,
		`{"version":1,"asked":{"fork":{"id":"1","at":"2026-11-22T12:00:00Z","begun":true}}}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		l, err := parseMetadata(data)
		if err != nil {
			if !errors.Is(err, spec.ErrMetadata) {
				t.Fatal(err)
			}
			return
		}
		if len(data) > maxMetadata || len(l.Owner) > spec.MaxMetadataOwner || len(l.Purpose) > spec.MaxMetadataPurpose || len(l.Tags) > spec.MaxMetadataTags || len(l.Rotate.To) > spec.MaxSnapshotID {
			t.Fatalf("%d bytes are read as %+v", len(data), l)
		}
		text, err := json.Marshal(metadataDoc{metadataVersion, l})
		if err != nil {
			return // a time beyond the year 9999
		}
		if len(text) > maxMetadata {
			return
		}
		again, err := parseMetadata(text)
		if err != nil || !again.Equal(l) {
			t.Fatalf("%q is written as %q, and read as %+v (%v)", data, text, again, err)
		}
	})
}
