package image

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/rootfs/image/fstree"
)

// mergeAll puts tar streams on each other.
func mergeAll(t *testing.T, streams ...[]byte) (*fstree.Tree, error) {
	t.Helper()
	m := newMerger(DefaultMaxFiles)
	lim := newBudget(DefaultMaxBytes, DefaultMaxFiles)
	for _, s := range streams {
		l, err := readLayer(t.Context(), bytes.NewReader(s), tempFile(t), lim, true)
		if err != nil {
			return nil, err
		}
		if err := m.apply(t.Context(), l); err != nil {
			return nil, err
		}
	}
	return m.t, nil
}

// sketch draws a tree as one line: directories end in a slash, symlinks show their target, files their content.
func sketch(t *testing.T, tr *fstree.Tree) string {
	t.Helper()
	var out []string
	err := tr.Walk(func(p string, n *fstree.Inode) error {
		switch {
		case p == ".":
		case n.IsDir():
			out = append(out, p+"/")
		case n.Target != "":
			out = append(out, p+"->"+n.Target)
		default:
			text, err := tr.ReadText(p, maxStatusBytes)
			if err != nil {
				return err
			}
			out = append(out, p+"="+text)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(out, " ")
}

// layerOf writes a layer. Regular files hold what stands behind "=" in their name.
func layerOf(t *testing.T, hs ...tar.Header) []byte {
	t.Helper()
	data := map[string][]byte{}
	for i := range hs {
		if name, text, ok := strings.Cut(hs[i].Name, "="); ok {
			hs[i].Name = name
			data[name] = []byte(text)
		}
	}
	return tarOf(t, data, hs...)
}

func TestMerge_layers_give_tree(t *testing.T) {
	L := func(hs ...tar.Header) []byte { return layerOf(t, hs...) }
	for name, c := range map[string]struct {
		layers [][]byte
		want   string
	}{
		"a whiteout hides what is below":                  {[][]byte{L(dirh("a/"), reg("a/f=1"), reg("a/g=2")), L(reg("a/.wh.f"))}, "a/ a/g=2"},
		"a whiteout of a directory hides all in it":       {[][]byte{L(dirh("a/"), dirh("a/b/"), reg("a/b/f=1")), L(reg("a/.wh.b"))}, "a/"},
		"a whiteout does not hide its own layer":          {[][]byte{L(reg("f=old")), L(reg("f=new"), reg(".wh.f"))}, "f=new"},
		"a whiteout before it does not either":            {[][]byte{L(reg("f=old")), L(reg(".wh.f"), reg("f=new"))}, "f=new"},
		"a whiteout hides old children of a new file":     {[][]byte{L(dirh("a/"), reg("a/f=1")), L(reg(".wh.a"), dirh("a/"), reg("a/g=2"))}, "a/ a/g=2"},
		"a whiteout of nothing is nothing":                {[][]byte{L(reg("f=1")), L(reg(".wh.g"), reg("no/where/.wh.h"))}, "f=1"},
		"a whiteout in the lowest layer is nothing":       {[][]byte{L(reg("f=1"), reg(".wh.f"))}, "f=1"},
		"an opaque directory hides what was in it":        {[][]byte{L(dirh("a/"), reg("a/f=1"), dirh("a/b/"), reg("a/b/g=2")), L(dirh("a/"), reg("a/h=3"), reg("a/.wh..wh..opq"))}, "a/ a/h=3"},
		"an opaque root":                                  {[][]byte{L(reg("f=1")), L(reg(".wh..wh..opq"), reg("g=2"))}, "g=2"},
		"opaque, then something below":                    {[][]byte{L(dirh("a/"), reg("a/f=1")), L(reg("a/.wh..wh..opq"), dirh("a/b/"), reg("a/b/x=2"))}, "a/ a/b/ a/b/x=2"},
		"a directory in place of a link is not behind it": {[][]byte{L(dirh("etc/"), reg("etc/f=1"), sym("a", "etc")), L(dirh("a/"), reg("a/.wh..wh..opq"), reg("a/g=2"))}, "a/ a/g=2 etc/ etc/f=1"},
		"a hidden link, then an opaque directory":         {[][]byte{L(dirh("etc/"), reg("etc/f=1"), sym("a", "etc")), L(reg("a/.wh..wh..opq"), reg(".wh.a"), reg("a/g=2"))}, "a/ a/g=2 etc/ etc/f=1"},
		"a whiteout behind a link of a lower layer":       {[][]byte{L(dirh("usr/"), dirh("usr/lib/"), reg("usr/lib/f=1"), sym("lib", "usr/lib")), L(reg("lib/.wh.f"))}, "lib->usr/lib usr/ usr/lib/"},
		"book-keeping of AUFS is left out":                {[][]byte{L(reg(".wh..wh.aufs"), dirh(".wh..wh.plnk/"), reg(".wh..wh.plnk/1.2"), reg("f=1"))}, "f=1"},
		"a file replaces a directory":                     {[][]byte{L(dirh("a/"), reg("a/f=1")), L(reg("a=2"))}, "a=2"},
		"a link replaces a directory":                     {[][]byte{L(dirh("a/"), reg("a/f=1")), L(sym("a", "b"))}, "a->b"},
		"a directory replaces a file":                     {[][]byte{L(reg("a=1")), L(dirh("a/"), reg("a/f=2"))}, "a/ a/f=2"},
		"a directory on a directory keeps what is in it":  {[][]byte{L(dirh("a/"), reg("a/f=1")), L(dirh("a/"), reg("a/g=2"))}, "a/ a/f=1 a/g=2"},
		"directories that nobody named are made":          {[][]byte{L(reg("a/b/c=1"))}, "a/ a/b/ a/b/c=1"},
		"a hard link within a layer":                      {[][]byte{L(reg("f=1"), lnk("g", "f"))}, "f=1 g=1"},
		"a hard link across layers":                       {[][]byte{L(reg("f=1")), L(lnk("a/g", "f"))}, "a/ a/g=1 f=1"},
		"a hard link survives the other name":             {[][]byte{L(reg("f=1"), lnk("g", "f")), L(reg(".wh.f"))}, "g=1"},
		"a new file under one name leaves the other":      {[][]byte{L(reg("f=1"), lnk("g", "f")), L(reg("f=2"))}, "f=2 g=1"},
		"a hard link behind a symlink of a directory":     {[][]byte{L(dirh("usr/"), reg("usr/f=1"), sym("s", "usr")), L(lnk("g", "s/f"))}, "g=1 s->usr usr/ usr/f=1"},
		"a hard link to a symlink is one":                 {[][]byte{L(sym("s", "x"), lnk("g", "s"))}, "g->x s->x"},
		"entries behind a link go where it leads":         {[][]byte{L(dirh("usr/"), sym("lib", "usr")), L(reg("lib/f=1"))}, "lib->usr usr/ usr/f=1"},
		"a link out of the root stays in it":              {[][]byte{L(dirh("d/"), sym("d/s", "../../../../etc")), L(reg("d/s/f=1"))}, "d/ d/s->../../../../etc etc/ etc/f=1"},
		"an absolute link begins at the root of the tree": {[][]byte{L(sym("s", "/abs/dir")), L(reg("s/f=1"))}, "abs/ abs/dir/ abs/dir/f=1 s->/abs/dir"},
		"a link by way of links":                          {[][]byte{L(sym("a", "b/c"), sym("b", "d"), dirh("d/"), sym("d/c", "/e")), L(reg("a/f=1"))}, "a->b/c b->d d/ d/c->/e e/ e/f=1"},
		"absolute names are of the tree":                  {[][]byte{L(reg("/abs=1"), reg("//x///y=2"))}, "abs=1 x/ x/y=2"},
		"of two entries the later counts":                 {[][]byte{L(reg("f=1"), reg("f=2"), sym("f", "x"), reg("f=3"))}, "f=3"},
		"a root of its own":                               {[][]byte{L(dirh("./"), reg("./f=1")), L(dirh("/"))}, "f=1"},
	} {
		t.Run(name, func(t *testing.T) {
			tr, err := mergeAll(t, c.layers...)
			if err != nil {
				t.Fatal(err)
			}
			if got := sketch(t, tr); got != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
			if _, err := tr.Finish(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestMerge_attributes_are_those_of_the_topmost_entry(t *testing.T) {
	tr, err := mergeAll(t,
		tarOf(t, nil, tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o700, Uid: 3}, tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o700},
			tar.Header{Name: "d/s", Mode: 0o4755, Uid: 70000, Gid: 4294967294, PAXRecords: map[string]string{"SCHILY.xattr.user.a": "1"}}),
		tarOf(t, nil, tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o1777, Gid: 9, ModTime: when.Add(time.Nanosecond)},
			tar.Header{Name: "old", ModTime: time.Unix(-5, 0)}, tar.Header{Name: "implied/f"}))
	if err != nil {
		t.Fatal(err)
	}
	if n := tr.Lookup("d"); n.Mode.String() != "dtrwxrwxrwx" || n.GID != 9 || !n.Mtime.Equal(when.Add(time.Nanosecond)) || len(n.Children) != 1 {
		t.Errorf("d: %v %d:%d %v", n.Mode, n.UID, n.GID, n.Mtime)
	}
	if n := tr.Lookup("d/s"); n.Mode.String() != "urwxr-xr-x" || n.UID != 70000 || n.GID != 4294967294 || n.Xattrs["user.a"] != "1" {
		t.Errorf("d/s: %v %d:%d %v", n.Mode, n.UID, n.GID, n.Xattrs)
	}
	if n := tr.Root; n.Mode.Perm() != 0o700 || n.UID != 3 {
		t.Errorf("root: %v %d", n.Mode, n.UID)
	}
	if n := tr.Lookup("old"); n.Mtime.Unix() != 0 || tr.Skipped.Times != 1 {
		t.Errorf("old: %v, %+v", n.Mtime, tr.Skipped)
	}
	if n := tr.Lookup("implied"); n.Mode.Perm() != 0o755 || n.UID != 0 || !n.Mtime.Equal(tr.Root.Mtime) {
		t.Errorf("implied: %v %d %v", n.Mode, n.UID, n.Mtime)
	}
}

func TestMerge_refuses(t *testing.T) {
	L := func(hs ...tar.Header) []byte { return layerOf(t, hs...) }
	var loop []tar.Header
	for i := range maxLinkHops + 2 {
		loop = append(loop, sym(fmt.Sprintf("l%d", i), fmt.Sprintf("l%d", i+1)))
	}
	deep := strings.TrimSuffix(strings.Repeat("d/", maxDepth-1), "/")
	for name, c := range map[string]struct {
		layers [][]byte
		want   error
	}{
		"a name with two dots":                     {[][]byte{L(reg("a/../../etc/passwd"))}, ErrBadArchive},
		"two dots alone":                           {[][]byte{L(dirh(".."))}, ErrBadArchive},
		"an absolute name with two dots":           {[][]byte{L(reg("/../../etc/passwd"))}, ErrBadArchive},
		"a whiteout of two dots":                   {[][]byte{L(reg("a/.wh..."))}, ErrBadArchive},
		"a whiteout of one dot":                    {[][]byte{L(reg("a/.wh.."))}, ErrBadArchive},
		"a whiteout of nothing":                    {[][]byte{L(reg(".wh."))}, ErrBadArchive},
		"something below a whiteout":               {[][]byte{L(reg(".wh.d/f"))}, ErrBadArchive},
		"something below an opaque mark":           {[][]byte{L(reg("d/.wh..wh..opq/f"))}, ErrBadArchive},
		"a hard link to two dots":                  {[][]byte{L(lnk("l", "../../etc/shadow"))}, ErrBadArchive},
		"a hard link to outside by a symlink":      {[][]byte{L(sym("s", "/etc"), lnk("l", "s/shadow"))}, ErrBadArchive},
		"a hard link to a directory":               {[][]byte{L(dirh("d/")), L(lnk("l", "d"))}, ErrBadArchive},
		"a hard link to the root":                  {[][]byte{L(lnk("l", "/"))}, ErrBadArchive},
		"a hard link to nothing":                   {[][]byte{L(lnk("l", "x"))}, ErrBadArchive},
		"a hard link to a later entry":             {[][]byte{L(lnk("l", "x"), reg("x=1"))}, ErrBadArchive},
		"a hard link to what its layer hides":      {[][]byte{L(reg("x=1")), L(reg(".wh.x"), lnk("l", "x"))}, ErrBadArchive},
		"a hard link to itself":                    {[][]byte{L(lnk("l", "l"))}, ErrBadArchive},
		"a file below a file":                      {[][]byte{L(reg("f=1")), L(reg("f/g=2"))}, ErrBadArchive},
		"a file behind a link to a file":           {[][]byte{L(reg("f=1"), sym("s", "f")), L(reg("s/g=2"))}, ErrBadArchive},
		"a file behind a link to itself":           {[][]byte{L(sym("s", "s"), reg("s/f=1"))}, ErrBadArchive},
		"a file behind links in a ring":            {[][]byte{L(sym("a", "b"), sym("b", "a")), L(reg("a/f=1"))}, ErrBadArchive},
		"a file behind too many links":             {[][]byte{L(loop...), L(reg("l0/f=1"))}, ErrBadArchive},
		"a link that grows as it is followed":      {[][]byte{L(sym("s", "s/s/s/s")), L(reg("s/f=1"))}, ErrBadArchive},
		"directories without end, by links":        {[][]byte{L(dirh(deep+"/"), sym("s", "/"+deep)), L(reg("s/e/e/e/f=1"))}, ErrBadArchive},
		"directories without end, by name":         {[][]byte{L(reg(strings.Repeat("d/", maxDepth) + "f=1"))}, ErrBadArchive},
		"a path of too many bytes, by links":       {[][]byte{L(dirh(strings.Repeat(strings.Repeat("n", 200)+"/", 20)), sym("s", strings.Repeat(strings.Repeat("n", 200)+"/", 20))), L(reg("s/" + strings.Repeat("m", 200)))}, ErrBadArchive},
		"a file in place of the root":              {[][]byte{tarOf(t, nil, tar.Header{Name: "/", Typeflag: tar.TypeSymlink, Linkname: "x"})}, ErrBadArchive},
		"a name of 256 bytes":                      {[][]byte{L(reg(strings.Repeat("n", 256)))}, ErrBadArchive},
		"a path of 5000 bytes":                     {[][]byte{L(reg(strings.Repeat("n/", 2500) + "x"))}, ErrBadArchive},
		"a name of 256 bytes that a link leads to": {[][]byte{L(sym("s", strings.Repeat("n", 256))), L(reg("s/f"))}, ErrBadArchive},
		"a symlink without a target":               {[][]byte{L(sym("s", ""))}, ErrBadArchive},
		"a symlink target of 5000 bytes":           {[][]byte{L(sym("s", strings.Repeat("t", 5000)))}, ErrBadArchive},
		"a device number out of range":             {[][]byte{L(tar.Header{Name: "d", Typeflag: tar.TypeChar, Devmajor: 4096})}, ErrBadArchive},
		"an owner out of range":                    {[][]byte{L(tar.Header{Name: "f", Uid: 1 << 32})}, ErrBadArchive},
		"an unknown kind of entry":                 {[][]byte{L(tar.Header{Name: "f", Typeflag: 'V'})}, ErrBadArchive},
		"64 KiB of attributes of a whole": {[][]byte{L(tar.Header{Name: "f", PAXRecords: map[string]string{
			"SCHILY.xattr.user.a": strings.Repeat("a", 40<<10), "SCHILY.xattr.user.b": strings.Repeat("b", 30<<10)}})}, ErrBadArchive},
	} {
		t.Run(name, func(t *testing.T) {
			tr, err := mergeAll(t, c.layers...)
			if !errors.Is(err, c.want) {
				got := "an error"
				if err == nil {
					got = sketch(t, tr)
				}
				t.Errorf("got %v (%.200s), want %v", err, got, c.want)
			}
		})
	}
}

// rawTar writes one header by hand, which package archive/tar would refuse to write, and its content.
func rawTar(name string, typeflag byte, size string, content string, spoil func(h []byte)) []byte {
	h := make([]byte, 512)
	copy(h, name)
	copy(h[100:], "0000644\x000000000\x000000000\x00")
	copy(h[124:], size)
	copy(h[136:], "14000000000\x00")
	h[156] = typeflag
	copy(h[257:], "ustar\x0000")
	if spoil != nil {
		spoil(h)
	}
	copy(h[148:], "        ")
	sum := 0
	for _, b := range h {
		sum += int(b)
	}
	copy(h[148:], fmt.Sprintf("%06o\x00 ", sum))
	body := append([]byte(content), make([]byte, (512-len(content)%512)%512)...)
	return append(append(h, body...), make([]byte, 1024)...)
}

// paxTar writes PAX records before a file.
func paxTar(records ...string) []byte {
	var b strings.Builder
	for _, r := range records {
		n := len(r) + 3
		for len(fmt.Sprint(n))+len(r)+2 != n {
			n = len(fmt.Sprint(n)) + len(r) + 2
		}
		fmt.Fprintf(&b, "%d %s\n", n, r)
	}
	pax := rawTar("pax", 'x', fmt.Sprintf("%011o\x00", b.Len()), b.String(), nil)
	return append(pax[:len(pax)-1024], rawTar("f", '0', "00000000000\x00", "", nil)...)
}

func TestReadLayer_stream_that_lies_is_refused(t *testing.T) {
	big := maps.Collect(maps.All(map[string][]byte{"z": make([]byte, 3<<20)}))
	for name, c := range map[string]struct {
		stream []byte
		max    int64
		want   error
	}{
		"size beyond the stream":         {stream: rawTar("f", '0', "00000010000\x00", "short", nil), want: ErrBadArchive},
		"size of 8 EiB less one":         {stream: rawTar("f", '0', "\x80\x00\x00\x00\x7f\xff\xff\xff\xff\xff\xff\xff", "x", nil), want: ErrTooLarge},
		"size that is negative":          {stream: rawTar("f", '0', "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xfe", "x", nil), want: ErrBadArchive},
		"size that is no number":         {stream: rawTar("f", '0', "bananas", "x", nil), want: ErrBadArchive},
		"checksum that is wrong":         {stream: append([]byte("x"), rawTar("f", '0', "00000000000\x00", "", nil)[1:]...), want: ErrBadArchive},
		"name with a zero byte":          {stream: paxTar("path=a\x00b"), want: ErrBadArchive},
		"link with a zero byte":          {stream: paxTar("linkpath=a\x00b"), want: ErrBadArchive},
		"record that is cut":             {stream: paxTar("path=x", "size=999999999999999999999999"), want: ErrBadArchive},
		"record of 2 MiB":                {stream: paxTar("comment=" + strings.Repeat("x", 2<<20)), want: ErrBadArchive},
		"owner that is negative":         {stream: paxTar("uid=-1"), want: ErrBadArchive},
		"sparse file larger than it may": {stream: paxTar("GNU.sparse.major=0", "GNU.sparse.minor=1", "GNU.sparse.numblocks=1", "GNU.sparse.map=0,0", "GNU.sparse.size=9223372036854775807"), want: ErrTooLarge},
		"sparse map that overlaps":       {stream: paxTar("GNU.sparse.major=0", "GNU.sparse.minor=1", "GNU.sparse.numblocks=2", "GNU.sparse.map=0,10,5,10", "GNU.sparse.size=100"), want: ErrBadArchive},
		"300 attributes":                 {stream: paxTar(manyXattrs(300)...), want: ErrBadArchive},
		"name of an attribute, 300":      {stream: paxTar("SCHILY.xattr.user." + strings.Repeat("n", 300) + "=v"), want: ErrBadArchive},
		"more content than it may":       {stream: tarOf(t, big, reg("z")), max: 1 << 20, want: ErrTooLarge},
		"content altogether":             {stream: tarOf(t, map[string][]byte{"a": make([]byte, 600), "b": make([]byte, 600)}, reg("a"), reg("b")), max: 1000, want: ErrTooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			if c.max == 0 {
				c.max = DefaultMaxBytes
			}
			_, err := readLayer(t.Context(), bytes.NewReader(c.stream), tempFile(t), newBudget(c.max, DefaultMaxFiles), true)
			if !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
		})
	}
}

func manyXattrs(n int) []string {
	var out []string
	for i := range n {
		out = append(out, fmt.Sprintf("SCHILY.xattr.user.%d=v", i))
	}
	slices.Sort(out)
	return out
}

func TestReadLayer_sparse_file_has_its_holes(t *testing.T) {
	// GNU sparse format 0.1: two bytes at 0, two at 8190.
	stream := paxTar("GNU.sparse.major=0", "GNU.sparse.minor=1", "GNU.sparse.numblocks=2", "GNU.sparse.map=0,2,8190,2", "GNU.sparse.size=8192", "GNU.sparse.name=s")
	body := rawTar("f", '0', "00000000004\x00", "abyz", nil)
	stream = append(stream[:len(stream)-512-1024], body...)
	tr, err := mergeAll(t, stream)
	if err != nil {
		t.Fatal(err)
	}
	got, err := tr.ReadText("s", maxStatusBytes)
	if want := "ab" + strings.Repeat("\x00", 8188) + "yz"; err != nil || got != want {
		t.Errorf("%d bytes (%v), want %d", len(got), err, len(want))
	}
}

func TestBudget_counts_entries_and_names_of_all_layers(t *testing.T) {
	b := newBudget(10, DefaultMaxFiles)
	h := &tar.Header{Name: "n"}
	b.entries.Store(DefaultMaxFiles - 1)
	if err := b.take(h, 0); err != nil {
		t.Error(err)
	}
	if err := b.take(h, 0); !errors.Is(err, ErrTooLarge) {
		t.Errorf("an entry too many: %v", err)
	}
	b = newBudget(10, DefaultMaxFiles)
	b.meta.Store(metaPerFile*DefaultMaxFiles - 3)
	if err := b.take(&tar.Header{Name: "n", PAXRecords: map[string]string{"k": "vvv"}}, 0); !errors.Is(err, ErrTooLarge) {
		t.Errorf("names and attributes: %v", err)
	}
}

func TestMerge_too_many_links_altogether_are_refused(t *testing.T) {
	m := newMerger(DefaultMaxFiles)
	m.followed = maxFollowed - 1 // and "/" has two components
	l, err := readLayer(t.Context(), bytes.NewReader(layerOf(t, sym("s", "/"), reg("s/f=1"))), tempFile(t), newBudget(10, DefaultMaxFiles), true)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.apply(t.Context(), l); !errors.Is(err, ErrTooLarge) {
		t.Errorf("got %v", err)
	}
}
