package templates

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

func TestFixed_is_the_directory_before_the_first_wildcard(t *testing.T) {
	for pattern, want := range map[string]string{
		"folder/*": "folder", "folder": "folder", "folder/a.txt": "folder/a.txt", "*.txt": ".", ".": ".", "./a/./b": "a/b", "a/**/b": "a", "a/[x]/b": "a",
	} {
		if got := fixed(pattern); got != want {
			t.Errorf("%s: %s, want %s", pattern, got, want)
		}
	}
}

func stream(zipped bool, headers ...*tar.Header) []byte {
	var b bytes.Buffer
	var w io.Writer = &b
	z := gzip.NewWriter(&b)
	if zipped {
		w = z
	}
	t := tar.NewWriter(w)
	for _, h := range headers {
		h.Size = 1
		if h.Typeflag != tar.TypeReg {
			h.Size = 0
		}
		_ = t.WriteHeader(h)
		if h.Size > 0 {
			_, _ = t.Write([]byte("x"))
		}
	}
	_ = t.Close()
	if zipped {
		_ = z.Close()
	}
	return b.Bytes()
}

func TestEach_gives_the_entries_of_a_stream_that_stay_in_the_tree(t *testing.T) {
	file := func(name string) *tar.Header { return &tar.Header{Typeflag: tar.TypeReg, Name: name} }
	for name, c := range map[string]struct {
		data []byte
		want string // names, or the beginning of an error
	}{
		"plain":           {stream(false, file("a"), file("b/c")), "a b/c"},
		"gzip":            {stream(true, file("a"), &tar.Header{Typeflag: tar.TypeSymlink, Name: "l", Linkname: "/etc"}), "a l"},
		"a device":        {stream(true, file("a"), &tar.Header{Typeflag: tar.TypeChar, Name: "d"}), "a"},
		"out of the tree": {stream(true, file("a"), file("../b")), "COPY: the name"},
		"absolute":        {stream(false, file("/etc/passwd")), "COPY: the name"},
		"empty":           {nil, "COPY: the uploaded files"},
		"no tar":          {[]byte(strings.Repeat("hello", 300)), "COPY: the uploaded files"},
		"no gzip":         {[]byte{0x1f, 0x8b, 0, 0}, "COPY: the uploaded files"},
		"cut":             {stream(false, file("a"), file("b"))[:1100], "COPY: the uploaded files"},
	} {
		t.Run(name, func(t *testing.T) {
			var names []string
			err := each(t.Context(), bytes.NewReader(c.data), maxCopied, func(h *tar.Header, r io.Reader) error {
				names = append(names, h.Name)
				return nil
			})
			var reason *buildReason
			switch {
			case err == nil:
				if got := strings.Join(names, " "); got != c.want {
					t.Error(got)
				}
			case !errors.As(err, &reason) || !strings.HasPrefix(reason.Message, c.want):
				t.Error(err)
			}
		})
	}
}

func FuzzEach(f *testing.F) {
	f.Add(stream(false, &tar.Header{Typeflag: tar.TypeReg, Name: "a/b"}))
	f.Add(stream(true, &tar.Header{Typeflag: tar.TypeLink, Name: "l", Linkname: "../a"}))
	f.Fuzz(func(t *testing.T, data []byte) {
		_ = each(t.Context(), bytes.NewReader(data), maxCopied, func(h *tar.Header, r io.Reader) error {
			if !filepath.IsLocal(h.Name) {
				t.Fatal(h.Name)
			}
			_, err := io.Copy(io.Discard, io.LimitReader(r, 1<<20))
			return err
		})
	})
}

func TestMarks_of_a_build_are_in_the_tags_of_its_snapshot(t *testing.T) {
	want := Marks{"iabc", "0123", "name", []string{"default", "v1"}}
	tags := want.tags("an owner")
	if !slices.Contains(tags, ownerTag("an owner")) || !isOf(spec.SnapshotInfo{Tags: tags}, "an owner") || isOf(spec.SnapshotInfo{Tags: tags}, "") || isOf(spec.SnapshotInfo{Tags: tags}, "other") {
		t.Error(tags)
	}
	if got := MarksOf(spec.SnapshotInfo{Tags: tags}); got.Template != want.Template || got.Build != want.Build || got.Name != want.Name || !slices.Equal(got.Versions, want.Versions) {
		t.Error(got)
	}
	if got := MarksOf(spec.SnapshotInfo{Tags: SnapshotTags("", "mine")}); got.Template != "" || got.Name != "mine" {
		t.Error(got)
	}
}

func TestBuild_log_is_bounded(t *testing.T) {
	b := &build{}
	for range maxLogEntries + 10 {
		b.say("info", "1", "%s", strings.Repeat("ä", maxLogLine))
	}
	if n := len(b.logs); n != maxLogEntries || len(b.logs[0].Message) > maxLogLine || !strings.Contains(b.logs[n-1].Message, "full") {
		t.Error(n, len(b.logs[0].Message), b.logs[n-1].Message)
	}
}

func TestBegins_leaves_places_for_the_builds_of_other_owners(t *testing.T) {
	all := &Templates{building: map[string]*build{}}
	begins := func(id, owner string) bool {
		b := all.building[id]
		if b == nil {
			b = &build{owner: owner}
			all.building[id] = b
		}
		return all.begins(b)
	}
	for _, step := range []struct {
		id, owner string
		want      bool
	}{
		{"a1", "alice", true}, {"a2", "alice", true}, {"a3", "alice", false}, {"b1", "bob", true}, {"n1", "", true}, {"n2", "", false}, {"b2", "bob", false},
	} {
		if got := begins(step.id, step.owner); got != step.want {
			t.Errorf("%s of %q begins: %v", step.id, step.owner, got)
		}
	}
	all.ends(all.building["a1"])
	if begins("n2", "") != true || begins("a3", "alice") {
		t.Error("the place that was given back is not for the next one alone")
	}
	all.ends(all.building["b1"])
	if !begins("a3", "alice") {
		t.Error("an owner's next build does not begin after the end of another")
	}
}

// endless is a tar stream with a file that does not end.
type endless struct {
	head io.Reader
	read func()
}

func (e endless) Read(p []byte) (int, error) {
	e.read()
	if n, _ := e.head.Read(p); n > 0 {
		return n, nil
	}
	clear(p)
	return len(p), nil
}

func TestAttack_upload_unpacks_without_end(t *testing.T) {
	var head bytes.Buffer
	if err := tar.NewWriter(&head).WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "a", Size: 1 << 50}); err != nil {
		t.Fatal(err)
	}
	none := func(*tar.Header, io.Reader) error { return nil }
	reads := 0
	err := each(t.Context(), endless{bytes.NewReader(head.Bytes()), func() { reads++ }}, 1<<20, none)
	if err == nil || !strings.Contains(err.Error(), "too many bytes") {
		t.Error("it has more bytes than it may:", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	reads = 0
	err = each(ctx, endless{bytes.NewReader(head.Bytes()), func() {
		if reads++; reads == 100 {
			cancel()
		}
	}}, 1<<50, none)
	if !errors.Is(err, context.Canceled) || reads > 200 {
		t.Error("the build has ended:", err, reads)
	}
}
