package layers

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

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
	"github.com/drowse-vm/drowse/rootfs/image/imagetest"
)

// mergeAll merges tar streams in order.
func mergeAll(t *testing.T, streams ...[]byte) (*fstree.Tree, error) {
	t.Helper()
	m := NewMerger(1 << 20)
	lim := NewBudget(64<<30, 1<<20)
	for _, s := range streams {
		l, err := Read(t.Context(), bytes.NewReader(s), imagetest.TempFile(t), lim, true)
		if err != nil {
			return nil, err
		}
		if err := m.Apply(t.Context(), l); err != nil {
			return nil, err
		}
	}
	return m.Tree, nil
}

func TestMerge_layers_give_tree(t *testing.T) {
	L := func(hs ...tar.Header) []byte { return imagetest.LayerOf(t, hs...) }
	for name, c := range map[string]struct {
		layers [][]byte
		want   string
	}{
		"a whiteout hides what is below":                  {[][]byte{L(imagetest.Dirh("a/"), imagetest.Reg("a/f=1"), imagetest.Reg("a/g=2")), L(imagetest.Reg("a/.wh.f"))}, "a/ a/g=2"},
		"a whiteout of a directory hides all in it":       {[][]byte{L(imagetest.Dirh("a/"), imagetest.Dirh("a/b/"), imagetest.Reg("a/b/f=1")), L(imagetest.Reg("a/.wh.b"))}, "a/"},
		"a whiteout does not hide its own layer":          {[][]byte{L(imagetest.Reg("f=old")), L(imagetest.Reg("f=new"), imagetest.Reg(".wh.f"))}, "f=new"},
		"a whiteout before it does not either":            {[][]byte{L(imagetest.Reg("f=old")), L(imagetest.Reg(".wh.f"), imagetest.Reg("f=new"))}, "f=new"},
		"a whiteout hides old children of a new file":     {[][]byte{L(imagetest.Dirh("a/"), imagetest.Reg("a/f=1")), L(imagetest.Reg(".wh.a"), imagetest.Dirh("a/"), imagetest.Reg("a/g=2"))}, "a/ a/g=2"},
		"a whiteout of nothing is nothing":                {[][]byte{L(imagetest.Reg("f=1")), L(imagetest.Reg(".wh.g"), imagetest.Reg("no/where/.wh.h"))}, "f=1"},
		"a whiteout in the lowest layer is nothing":       {[][]byte{L(imagetest.Reg("f=1"), imagetest.Reg(".wh.f"))}, "f=1"},
		"an opaque directory hides what was in it":        {[][]byte{L(imagetest.Dirh("a/"), imagetest.Reg("a/f=1"), imagetest.Dirh("a/b/"), imagetest.Reg("a/b/g=2")), L(imagetest.Dirh("a/"), imagetest.Reg("a/h=3"), imagetest.Reg("a/.wh..wh..opq"))}, "a/ a/h=3"},
		"an opaque root":                                  {[][]byte{L(imagetest.Reg("f=1")), L(imagetest.Reg(".wh..wh..opq"), imagetest.Reg("g=2"))}, "g=2"},
		"opaque, then something below":                    {[][]byte{L(imagetest.Dirh("a/"), imagetest.Reg("a/f=1")), L(imagetest.Reg("a/.wh..wh..opq"), imagetest.Dirh("a/b/"), imagetest.Reg("a/b/x=2"))}, "a/ a/b/ a/b/x=2"},
		"a directory in place of a link is not behind it": {[][]byte{L(imagetest.Dirh("etc/"), imagetest.Reg("etc/f=1"), imagetest.Sym("a", "etc")), L(imagetest.Dirh("a/"), imagetest.Reg("a/.wh..wh..opq"), imagetest.Reg("a/g=2"))}, "a/ a/g=2 etc/ etc/f=1"},
		"a hidden link, then an opaque directory":         {[][]byte{L(imagetest.Dirh("etc/"), imagetest.Reg("etc/f=1"), imagetest.Sym("a", "etc")), L(imagetest.Reg("a/.wh..wh..opq"), imagetest.Reg(".wh.a"), imagetest.Reg("a/g=2"))}, "a/ a/g=2 etc/ etc/f=1"},
		"a whiteout behind a link of a lower layer":       {[][]byte{L(imagetest.Dirh("usr/"), imagetest.Dirh("usr/lib/"), imagetest.Reg("usr/lib/f=1"), imagetest.Sym("lib", "usr/lib")), L(imagetest.Reg("lib/.wh.f"))}, "lib->usr/lib usr/ usr/lib/"},
		"book-keeping of AUFS is left out":                {[][]byte{L(imagetest.Reg(".wh..wh.aufs"), imagetest.Dirh(".wh..wh.plnk/"), imagetest.Reg(".wh..wh.plnk/1.2"), imagetest.Reg("f=1"))}, "f=1"},
		"a file replaces a directory":                     {[][]byte{L(imagetest.Dirh("a/"), imagetest.Reg("a/f=1")), L(imagetest.Reg("a=2"))}, "a=2"},
		"a link replaces a directory":                     {[][]byte{L(imagetest.Dirh("a/"), imagetest.Reg("a/f=1")), L(imagetest.Sym("a", "b"))}, "a->b"},
		"a directory replaces a file":                     {[][]byte{L(imagetest.Reg("a=1")), L(imagetest.Dirh("a/"), imagetest.Reg("a/f=2"))}, "a/ a/f=2"},
		"a directory on a directory keeps what is in it":  {[][]byte{L(imagetest.Dirh("a/"), imagetest.Reg("a/f=1")), L(imagetest.Dirh("a/"), imagetest.Reg("a/g=2"))}, "a/ a/f=1 a/g=2"},
		"directories that nobody named are made":          {[][]byte{L(imagetest.Reg("a/b/c=1"))}, "a/ a/b/ a/b/c=1"},
		"a hard link within a layer":                      {[][]byte{L(imagetest.Reg("f=1"), imagetest.Lnk("g", "f"))}, "f=1 g=1"},
		"a hard link across layers":                       {[][]byte{L(imagetest.Reg("f=1")), L(imagetest.Lnk("a/g", "f"))}, "a/ a/g=1 f=1"},
		"a hard link survives the other name":             {[][]byte{L(imagetest.Reg("f=1"), imagetest.Lnk("g", "f")), L(imagetest.Reg(".wh.f"))}, "g=1"},
		"a new file under one name leaves the other":      {[][]byte{L(imagetest.Reg("f=1"), imagetest.Lnk("g", "f")), L(imagetest.Reg("f=2"))}, "f=2 g=1"},
		"a hard link behind a symlink of a directory":     {[][]byte{L(imagetest.Dirh("usr/"), imagetest.Reg("usr/f=1"), imagetest.Sym("s", "usr")), L(imagetest.Lnk("g", "s/f"))}, "g=1 s->usr usr/ usr/f=1"},
		"a hard link to a symlink is one":                 {[][]byte{L(imagetest.Sym("s", "x"), imagetest.Lnk("g", "s"))}, "g->x s->x"},
		"entries behind a link go where it leads":         {[][]byte{L(imagetest.Dirh("usr/"), imagetest.Sym("lib", "usr")), L(imagetest.Reg("lib/f=1"))}, "lib->usr usr/ usr/f=1"},
		"a link out of the root stays in it":              {[][]byte{L(imagetest.Dirh("d/"), imagetest.Sym("d/s", "../../../../etc")), L(imagetest.Reg("d/s/f=1"))}, "d/ d/s->../../../../etc etc/ etc/f=1"},
		"an absolute link begins at the root of the tree": {[][]byte{L(imagetest.Sym("s", "/abs/dir")), L(imagetest.Reg("s/f=1"))}, "abs/ abs/dir/ abs/dir/f=1 s->/abs/dir"},
		"a link by way of links":                          {[][]byte{L(imagetest.Sym("a", "b/c"), imagetest.Sym("b", "d"), imagetest.Dirh("d/"), imagetest.Sym("d/c", "/e")), L(imagetest.Reg("a/f=1"))}, "a->b/c b->d d/ d/c->/e e/ e/f=1"},
		"absolute names are of the tree":                  {[][]byte{L(imagetest.Reg("/abs=1"), imagetest.Reg("//x///y=2"))}, "abs=1 x/ x/y=2"},
		"of two entries the later counts":                 {[][]byte{L(imagetest.Reg("f=1"), imagetest.Reg("f=2"), imagetest.Sym("f", "x"), imagetest.Reg("f=3"))}, "f=3"},
		"a root of its own":                               {[][]byte{L(imagetest.Dirh("./"), imagetest.Reg("./f=1")), L(imagetest.Dirh("/"))}, "f=1"},
	} {
		t.Run(name, func(t *testing.T) {
			tr, err := mergeAll(t, c.layers...)
			if err != nil {
				t.Fatal(err)
			}
			if got := imagetest.Sketch(t, tr); got != c.want {
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
		imagetest.TarOf(t, nil, tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o700, Uid: 3}, tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o700},
			tar.Header{Name: "d/s", Mode: 0o4755, Uid: 70000, Gid: 4294967294, PAXRecords: map[string]string{"SCHILY.xattr.user.a": "1"}}),
		imagetest.TarOf(t, nil, tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o1777, Gid: 9, ModTime: imagetest.When.Add(time.Nanosecond)},
			tar.Header{Name: "old", ModTime: time.Unix(-5, 0)}, tar.Header{Name: "implied/f"}))
	if err != nil {
		t.Fatal(err)
	}
	if n := tr.Lookup("d"); n.Mode.String() != "dtrwxrwxrwx" || n.GID != 9 || !n.Mtime.Equal(imagetest.When.Add(time.Nanosecond)) || len(n.Children) != 1 {
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
	L := func(hs ...tar.Header) []byte { return imagetest.LayerOf(t, hs...) }
	var loop []tar.Header
	for i := range maxLinkHops + 2 {
		loop = append(loop, imagetest.Sym(fmt.Sprintf("l%d", i), fmt.Sprintf("l%d", i+1)))
	}
	deep := strings.TrimSuffix(strings.Repeat("d/", MaxDepth-1), "/")
	for name, c := range map[string]struct {
		layers [][]byte
		want   error
	}{
		"a name with two dots":                     {[][]byte{L(imagetest.Reg("a/../../etc/passwd"))}, image.ErrBadArchive},
		"two dots alone":                           {[][]byte{L(imagetest.Dirh(".."))}, image.ErrBadArchive},
		"an absolute name with two dots":           {[][]byte{L(imagetest.Reg("/../../etc/passwd"))}, image.ErrBadArchive},
		"a whiteout of two dots":                   {[][]byte{L(imagetest.Reg("a/.wh..."))}, image.ErrBadArchive},
		"a whiteout of one dot":                    {[][]byte{L(imagetest.Reg("a/.wh.."))}, image.ErrBadArchive},
		"a whiteout of nothing":                    {[][]byte{L(imagetest.Reg(".wh."))}, image.ErrBadArchive},
		"something below a whiteout":               {[][]byte{L(imagetest.Reg(".wh.d/f"))}, image.ErrBadArchive},
		"something below an opaque mark":           {[][]byte{L(imagetest.Reg("d/.wh..wh..opq/f"))}, image.ErrBadArchive},
		"a hard link to two dots":                  {[][]byte{L(imagetest.Lnk("l", "../../etc/shadow"))}, image.ErrBadArchive},
		"a hard link to outside by a symlink":      {[][]byte{L(imagetest.Sym("s", "/etc"), imagetest.Lnk("l", "s/shadow"))}, image.ErrBadArchive},
		"a hard link to a directory":               {[][]byte{L(imagetest.Dirh("d/")), L(imagetest.Lnk("l", "d"))}, image.ErrBadArchive},
		"a hard link to the root":                  {[][]byte{L(imagetest.Lnk("l", "/"))}, image.ErrBadArchive},
		"a hard link to nothing":                   {[][]byte{L(imagetest.Lnk("l", "x"))}, image.ErrBadArchive},
		"a hard link to a later entry":             {[][]byte{L(imagetest.Lnk("l", "x"), imagetest.Reg("x=1"))}, image.ErrBadArchive},
		"a hard link to what its layer hides":      {[][]byte{L(imagetest.Reg("x=1")), L(imagetest.Reg(".wh.x"), imagetest.Lnk("l", "x"))}, image.ErrBadArchive},
		"a hard link to itself":                    {[][]byte{L(imagetest.Lnk("l", "l"))}, image.ErrBadArchive},
		"a file below a file":                      {[][]byte{L(imagetest.Reg("f=1")), L(imagetest.Reg("f/g=2"))}, image.ErrBadArchive},
		"a file behind a link to a file":           {[][]byte{L(imagetest.Reg("f=1"), imagetest.Sym("s", "f")), L(imagetest.Reg("s/g=2"))}, image.ErrBadArchive},
		"a file behind a link to itself":           {[][]byte{L(imagetest.Sym("s", "s"), imagetest.Reg("s/f=1"))}, image.ErrBadArchive},
		"a file behind links in a ring":            {[][]byte{L(imagetest.Sym("a", "b"), imagetest.Sym("b", "a")), L(imagetest.Reg("a/f=1"))}, image.ErrBadArchive},
		"a file behind too many links":             {[][]byte{L(loop...), L(imagetest.Reg("l0/f=1"))}, image.ErrBadArchive},
		"a link that grows as it is followed":      {[][]byte{L(imagetest.Sym("s", "s/s/s/s")), L(imagetest.Reg("s/f=1"))}, image.ErrBadArchive},
		"directories without end, by links":        {[][]byte{L(imagetest.Dirh(deep+"/"), imagetest.Sym("s", "/"+deep)), L(imagetest.Reg("s/e/e/e/f=1"))}, image.ErrBadArchive},
		"directories without end, by name":         {[][]byte{L(imagetest.Reg(strings.Repeat("d/", MaxDepth) + "f=1"))}, image.ErrBadArchive},
		"a path of too many bytes, by links":       {[][]byte{L(imagetest.Dirh(strings.Repeat(strings.Repeat("n", 200)+"/", 20)), imagetest.Sym("s", strings.Repeat(strings.Repeat("n", 200)+"/", 20))), L(imagetest.Reg("s/" + strings.Repeat("m", 200)))}, image.ErrBadArchive},
		"a file in place of the root":              {[][]byte{imagetest.TarOf(t, nil, tar.Header{Name: "/", Typeflag: tar.TypeSymlink, Linkname: "x"})}, image.ErrBadArchive},
		"a name of 256 bytes":                      {[][]byte{L(imagetest.Reg(strings.Repeat("n", 256)))}, image.ErrBadArchive},
		"a path of 5000 bytes":                     {[][]byte{L(imagetest.Reg(strings.Repeat("n/", 2500) + "x"))}, image.ErrBadArchive},
		"a name of 256 bytes that a link leads to": {[][]byte{L(imagetest.Sym("s", strings.Repeat("n", 256))), L(imagetest.Reg("s/f"))}, image.ErrBadArchive},
		"a symlink without a target":               {[][]byte{L(imagetest.Sym("s", ""))}, image.ErrBadArchive},
		"a symlink target of 5000 bytes":           {[][]byte{L(imagetest.Sym("s", strings.Repeat("t", 5000)))}, image.ErrBadArchive},
		"a device number out of range":             {[][]byte{L(tar.Header{Name: "d", Typeflag: tar.TypeChar, Devmajor: 4096})}, image.ErrBadArchive},
		"an owner out of range":                    {[][]byte{L(tar.Header{Name: "f", Uid: 1 << 32})}, image.ErrBadArchive},
		"an unknown kind of entry":                 {[][]byte{L(tar.Header{Name: "f", Typeflag: 'V'})}, image.ErrBadArchive},
		"64 KiB of attributes of a whole": {[][]byte{L(tar.Header{Name: "f", PAXRecords: map[string]string{
			"SCHILY.xattr.user.a": strings.Repeat("a", 40<<10), "SCHILY.xattr.user.b": strings.Repeat("b", 30<<10)}})}, image.ErrBadArchive},
	} {
		t.Run(name, func(t *testing.T) {
			tr, err := mergeAll(t, c.layers...)
			if !errors.Is(err, c.want) {
				got := "an error"
				if err == nil {
					got = imagetest.Sketch(t, tr)
				}
				t.Errorf("got %v (%.200s), want %v", err, got, c.want)
			}
		})
	}
}

func TestReadLayer_stream_that_lies_is_refused(t *testing.T) {
	big := maps.Collect(maps.All(map[string][]byte{"z": make([]byte, 3<<20)}))
	for name, c := range map[string]struct {
		stream []byte
		max    int64
		want   error
	}{
		"size beyond the stream":         {stream: imagetest.RawTar("f", '0', "00000010000\x00", "short", nil), want: image.ErrBadArchive},
		"size of 8 EiB less one":         {stream: imagetest.RawTar("f", '0', "\x80\x00\x00\x00\x7f\xff\xff\xff\xff\xff\xff\xff", "x", nil), want: image.ErrTooLarge},
		"size that is negative":          {stream: imagetest.RawTar("f", '0', "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xfe", "x", nil), want: image.ErrBadArchive},
		"size that is no number":         {stream: imagetest.RawTar("f", '0', "bananas", "x", nil), want: image.ErrBadArchive},
		"checksum that is wrong":         {stream: append([]byte("x"), imagetest.RawTar("f", '0', "00000000000\x00", "", nil)[1:]...), want: image.ErrBadArchive},
		"name with a zero byte":          {stream: imagetest.PaxTar("path=a\x00b"), want: image.ErrBadArchive},
		"link with a zero byte":          {stream: imagetest.PaxTar("linkpath=a\x00b"), want: image.ErrBadArchive},
		"record that is cut":             {stream: imagetest.PaxTar("path=x", "size=999999999999999999999999"), want: image.ErrBadArchive},
		"record of 2 MiB":                {stream: imagetest.PaxTar("comment=" + strings.Repeat("x", 2<<20)), want: image.ErrBadArchive},
		"owner that is negative":         {stream: imagetest.PaxTar("uid=-1"), want: image.ErrBadArchive},
		"sparse file larger than it may": {stream: imagetest.PaxTar("GNU.sparse.major=0", "GNU.sparse.minor=1", "GNU.sparse.numblocks=1", "GNU.sparse.map=0,0", "GNU.sparse.size=9223372036854775807"), want: image.ErrTooLarge},
		"sparse map that overlaps":       {stream: imagetest.PaxTar("GNU.sparse.major=0", "GNU.sparse.minor=1", "GNU.sparse.numblocks=2", "GNU.sparse.map=0,10,5,10", "GNU.sparse.size=100"), want: image.ErrBadArchive},
		"300 attributes":                 {stream: imagetest.PaxTar(manyXattrs(300)...), want: image.ErrBadArchive},
		"name of an attribute, 300":      {stream: imagetest.PaxTar("SCHILY.xattr.user." + strings.Repeat("n", 300) + "=v"), want: image.ErrBadArchive},
		"more content than it may":       {stream: imagetest.TarOf(t, big, imagetest.Reg("z")), max: 1 << 20, want: image.ErrTooLarge},
		"content altogether":             {stream: imagetest.TarOf(t, map[string][]byte{"a": make([]byte, 600), "b": make([]byte, 600)}, imagetest.Reg("a"), imagetest.Reg("b")), max: 1000, want: image.ErrTooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			if c.max == 0 {
				c.max = 64 << 30
			}
			_, err := Read(t.Context(), bytes.NewReader(c.stream), imagetest.TempFile(t), NewBudget(c.max, 1<<20), true)
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
	stream := imagetest.PaxTar("GNU.sparse.major=0", "GNU.sparse.minor=1", "GNU.sparse.numblocks=2", "GNU.sparse.map=0,2,8190,2", "GNU.sparse.size=8192", "GNU.sparse.name=s")
	body := imagetest.RawTar("f", '0', "00000000004\x00", "abyz", nil)
	stream = append(stream[:len(stream)-512-1024], body...)
	tr, err := mergeAll(t, stream)
	if err != nil {
		t.Fatal(err)
	}
	got, err := tr.ReadText("s", 1<<20)
	if want := "ab" + strings.Repeat("\x00", 8188) + "yz"; err != nil || got != want {
		t.Errorf("%d bytes (%v), want %d", len(got), err, len(want))
	}
}

func TestBudget_counts_entries_and_names_of_all_layers(t *testing.T) {
	b := NewBudget(10, 1<<20)
	h := &tar.Header{Name: "n"}
	b.entries.Store(1<<20 - 1)
	if err := b.Take(h, 0); err != nil {
		t.Error(err)
	}
	if err := b.Take(h, 0); !errors.Is(err, image.ErrTooLarge) {
		t.Errorf("an entry too many: %v", err)
	}
	b = NewBudget(10, 1<<20)
	b.meta.Store(metaPerFile*1<<20 - 3)
	if err := b.Take(&tar.Header{Name: "n", PAXRecords: map[string]string{"k": "vvv"}}, 0); !errors.Is(err, image.ErrTooLarge) {
		t.Errorf("names and attributes: %v", err)
	}
}

func TestMerge_too_many_links_altogether_are_refused(t *testing.T) {
	m := NewMerger(1 << 20)
	m.followed = maxFollowed - 1 // and "/" has two components
	l, err := Read(t.Context(), bytes.NewReader(imagetest.LayerOf(t, imagetest.Sym("s", "/"), imagetest.Reg("s/f=1"))), imagetest.TempFile(t), NewBudget(10, 1<<20), true)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Apply(t.Context(), l); !errors.Is(err, image.ErrTooLarge) {
		t.Errorf("got %v", err)
	}
}
