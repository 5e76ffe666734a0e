package builder

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/imagetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// buildDir builds an image of a directory with one file of the given text.
func buildDir(t *testing.T, s *image.Store, text, tag string) *image.Image {
	t.Helper()
	root := t.TempDir()
	imagetest.Write(t, filepath.Join(root, "file"), text)
	for _, p := range []string{"file", "."} { // equal text gives equal images
		if err := os.Chtimes(filepath.Join(root, p), imagetest.When, imagetest.When); err != nil {
			t.Fatal(err)
		}
	}
	img, err := Build(t.Context(), Options{Store: s, From: "dir:" + root, Tag: tag})
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// rewriteRecord writes img as its record.
func rewriteRecord(t *testing.T, img *image.Image) {
	t.Helper()
	j, err := json.Marshal(img)
	if err != nil {
		t.Fatal(err)
	}
	imagetest.Write(t, filepath.Join(filepath.Dir(img.Path()), "image.json"), string(j))
}

func there(name string) bool {
	_, err := os.Lstat(name)
	return err == nil
}

func TestFind_by_tag_id_and_prefix(t *testing.T) {
	s := testStore(t)
	a, b := buildDir(t, s, "a", "a"), buildDir(t, s, "b", "b:v2")
	for ref, want := range map[string]*image.Image{
		"a": a, "a:latest": a, "b:v2": b, a.ID: a, a.ID[:8]: a, b.ShortID(): b, "sha256:" + b.ID: b,
	} {
		got, err := s.Find(ref)
		if err != nil || got.ID != want.ID || got.Path() != want.Path() {
			t.Errorf("%q: got %+v (%v), want %s", ref, got, err, want.ShortID())
		}
	}
	for _, ref := range []string{"b", "c", "", a.ID[:3], strings.Repeat("0", 64), "../images", "a:"} {
		if got, err := s.Find(ref); !errors.Is(err, image.ErrNotFound) {
			t.Errorf("%q: got %+v (%v), want ErrNotFound", ref, got, err)
		}
	}
	all, err := s.List()
	if err != nil || len(all) != 2 || all[0].ID != b.ID || all[1].ID != a.ID {
		t.Errorf("list: %+v (%v), want b before a", all, err)
	}
}

func TestPrefix_of_two_ids_is_ambiguous(t *testing.T) {
	s := testStore(t)
	for _, id := range []string{"abcd" + strings.Repeat("0", 60), "abcd" + strings.Repeat("1", 60)} {
		imagetest.Write(t, filepath.Join(s.Dir(), "images", id, "image.json"), fmt.Sprintf(`{"version": %d, "id": %q}`, image.RecordVersion, id))
	}
	if _, err := s.Find("abcd"); !errors.Is(err, image.ErrAmbiguous) || !strings.Contains(err.Error(), "abcd11111111") {
		t.Errorf("got %v, want ErrAmbiguous that lists the ids", err)
	}
	if img, err := s.Find("abcd1"); err != nil || img.ID[4] != '1' {
		t.Errorf("got %+v (%v)", img, err)
	}
}

func TestTag_moves_to_the_new_image(t *testing.T) {
	s := testStore(t)
	a, b := buildDir(t, s, "a", "x"), buildDir(t, s, "b", "x")
	if got, err := s.Find("x"); err != nil || got.ID != b.ID {
		t.Errorf("got %+v (%v), want the second image", got, err)
	}
	if got, err := s.Find(a.ID); err != nil || len(got.Tags) != 0 {
		t.Errorf("the first image has tags %v (%v)", got.Tags, err)
	}
	if err := s.Tag(t.Context(), a.ShortID(), "x"); err != nil {
		t.Fatal(err)
	}
	if got, err := s.Find("x"); err != nil || got.ID != a.ID {
		t.Errorf("got %+v (%v), want the first image", got, err)
	}
	// This is the state after a crash between the two records: both hold the tag, and the later one has it.
	b.Tags, b.Tagged = []string{"x:latest"}, time.Now().Add(time.Minute)
	rewriteRecord(t, b)
	all, err := s.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, img := range all {
		if has := len(img.Tags) == 1; has != (img.ID == b.ID) {
			t.Errorf("%s has tags %v", img.ShortID(), img.Tags)
		}
	}
	if err := s.Tag(t.Context(), "x", "not a tag"); !errors.Is(err, image.ErrInvalidOption) {
		t.Errorf("got %v, want ErrInvalidOption", err)
	}
}

func TestRemove(t *testing.T) {
	s := testStore(t)
	a := buildDir(t, s, "a", "one")
	if err := s.Tag(t.Context(), "one", "two"); err != nil {
		t.Fatal(err)
	}
	used := func(id string) bool { return id == a.ID }
	if _, err := s.Remove(t.Context(), a.ShortID(), used); !errors.Is(err, image.ErrInUse) {
		t.Errorf("by id: got %v, want ErrInUse", err)
	}
	got, err := s.Remove(t.Context(), "one", used) // one of several tags: the image stays
	if err != nil || got.Deleted || !slices.Equal(got.Untagged, []string{"one:latest"}) {
		t.Errorf("got %+v (%v), want only the tag gone", got, err)
	}
	if _, err := s.Remove(t.Context(), "two", used); !errors.Is(err, image.ErrInUse) {
		t.Errorf("by the last tag: got %v, want ErrInUse", err)
	}
	got, err = s.Remove(t.Context(), "two", func(string) bool { return false })
	if err != nil || !got.Deleted || got.ID != a.ID || !slices.Equal(got.Untagged, []string{"two:latest"}) {
		t.Errorf("got %+v (%v), want the image gone", got, err)
	}
	wantEmpty(t, s)
	if _, err := s.Remove(t.Context(), "two", nil); !errors.Is(err, image.ErrNotFound) {
		t.Errorf("again: got %v, want ErrNotFound", err)
	}
}

func TestDamaged_image_is_told_by_check_and_built_again(t *testing.T) {
	text := strings.Repeat("content of the file. ", 1000)
	for name, c := range map[string]struct {
		damage func(img *image.Image) error
		check  error
	}{
		"sound":            {damage: func(*image.Image) error { return nil }},
		"half of it":       {func(i *image.Image) error { return os.Truncate(i.Path(), i.Size/2) }, image.ErrTruncated},
		"one byte missing": {func(i *image.Image) error { return os.Truncate(i.Path(), i.Size-1) }, image.ErrTruncated},
		"empty":            {func(i *image.Image) error { return os.Truncate(i.Path(), 0) }, image.ErrTruncated},
		"one byte more":    {func(i *image.Image) error { return os.Truncate(i.Path(), i.Size+1) }, image.ErrCorrupt},
		"missing":          {func(i *image.Image) error { return os.Remove(i.Path()) }, image.ErrCorrupt},
		"flip in magic":    {flip(1024 /* its superblock */), image.ErrCorrupt},
		"flip in block 0":  {flip(2000), image.ErrCorrupt},
		"a directory":      {func(i *image.Image) error { return errors.Join(os.Remove(i.Path()), os.Mkdir(i.Path(), 0o755)) }, image.ErrCorrupt},
	} {
		t.Run(name, func(t *testing.T) {
			s := testStore(t)
			img := buildDir(t, s, text, "x")
			if err := c.damage(img); err != nil {
				t.Fatal(err)
			}
			err := s.Check(img)
			if !errors.Is(err, c.check) || (err != nil && !strings.Contains(err.Error(), "build it again")) {
				t.Errorf("check: got %v, want %v with a remedy", err, c.check)
			}
			// Building the same image again repairs what the check finds.
			if again := buildDir(t, s, text, "x"); again.ID != img.ID {
				t.Errorf("after building again: %s, want %s", again.ID, img.ID)
			} else {
				checkHash(t, again)
			}
		})
	}
}

// checkHash compares the content of an image with its id.
func checkHash(t *testing.T, img *image.Image) {
	t.Helper()
	f, err := os.Open(img.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if got := imagetest.HashOf(t, f); got != img.ID {
		t.Errorf("image %s: its content has SHA-256 %s", img.ID, got)
	}
}

// flip changes one bit of an image.
func flip(at int64) func(*image.Image) error {
	return func(i *image.Image) error {
		if err := os.Chmod(i.Path(), 0o600); err != nil {
			return err
		}
		f, err := os.OpenFile(i.Path(), os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		var b [1]byte
		if _, err := f.ReadAt(b[:], at); err != nil {
			return err
		}
		b[0] ^= 4
		_, err = f.WriteAt(b[:], at)
		return err
	}
}

func TestDamaged_record_is_told_and_can_be_removed(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"cut":            {`{"version": 1, "id": "`, "image.json"},
		"empty":          {"", "image.json"},
		"newer version":  {`{"version": 2}`, "newer drowse"},
		"no version":     {`{}`, "version 0"},
		"of another one": {`{"version": 1, "id": "` + strings.Repeat("0", 64) + `"}`, "000000000000"},
	} {
		t.Run(name, func(t *testing.T) {
			s := testStore(t)
			good, bad := buildDir(t, s, "good", "good"), buildDir(t, s, "bad", "bad")
			if err := os.WriteFile(filepath.Join(filepath.Dir(bad.Path()), "image.json"), []byte(c.text), 0o644); err != nil {
				t.Fatal(err)
			}
			all, err := s.List()
			if len(all) != 1 || all[0].ID != good.ID || !errors.Is(err, image.ErrCorrupt) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("list: %d images, %v; want the good one, and %q", len(all), err, c.want)
			}
			if got, err := s.Find("good"); err != nil || got.ID != good.ID {
				t.Errorf("the good image is not found: %v", err)
			}
			if _, err := s.Find("bad"); !errors.Is(err, image.ErrCorrupt) {
				t.Errorf("find: got %v, want ErrCorrupt", err)
			}
			if got, err := s.Remove(t.Context(), bad.ID, nil); err != nil || !got.Deleted {
				t.Errorf("remove: %+v, %v", got, err)
			}
			if _, err := s.List(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestGarbage_of_dead_builds_is_pruned_and_living_ones_are_kept(t *testing.T) {
	s := testStore(t)
	living, err := s.NewTemp(t.Context(), "build-")
	if err != nil {
		t.Fatal(err)
	}
	dead := filepath.Join(s.Dir(), "tmp", "build-dead") // its lock is free, as after the death of its process
	imagetest.Write(t, filepath.Join(dead, "work/root/etc/x"), "left behind")
	imagetest.Write(t, filepath.Join(dead, "lock"), "")
	imagetest.Write(t, filepath.Join(s.Dir(), "tmp", "stray"), "file")

	buildDir(t, s, "x", "x") // prunes
	if there(dead) || there(filepath.Join(s.Dir(), "tmp", "stray")) || !there(living.Dir) {
		t.Errorf("dead is there: %v, stray: %v, living: %v; want only the living",
			there(dead), there(filepath.Join(s.Dir(), "tmp", "stray")), there(living.Dir))
	}
	if err := living.Remove(); err != nil {
		t.Fatal(err)
	}
	if n, err := s.Prune(t.Context()); n != 0 || err != nil {
		t.Errorf("pruned %d (%v), want nothing left", n, err)
	}
}

func TestConcurrent_builds_of_one_directory_give_one_image(t *testing.T) {
	s, root := testStore(t), sampleDir(t)
	var wg sync.WaitGroup
	ids := make([]string, 8)
	for i := range ids {
		wg.Go(func() {
			img, err := Build(t.Context(), Options{Store: s, From: "dir:" + root, Tag: fmt.Sprintf("t%d", i)})
			if err != nil {
				t.Error(err)
				return
			}
			ids[i] = img.ID
		})
	}
	wg.Wait()
	all, err := s.List()
	if err != nil || len(all) != 1 || len(all[0].Tags) != len(ids) {
		t.Fatalf("%d images (%v), want one with %d tags", len(all), err, len(ids))
	}
	for _, id := range ids {
		if id != all[0].ID {
			t.Errorf("a build gave %s, the store has %s", id, all[0].ID)
		}
	}
}

func TestWait_for_a_lock_ends_with_the_context(t *testing.T) {
	s := testStore(t)
	l, err := s.Lock(t.Context(), "store", osfile.Exclusive)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := s.Prune(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want that the deadline has passed", err)
	}
}

func TestBad_options_are_refused(t *testing.T) {
	s := testStore(t)
	for name, o := range map[string]Options{
		"no store":          {From: "debian:sid"},
		"packages with dir": {Store: s, From: "dir:/", Include: []string{"git"}},
		"mirror with dir":   {Store: s, From: "dir:/", Mirrors: []string{"http://m.example/"}},
		"bad tag":           {Store: s, From: "debian:sid", Tag: "A"},
		"bad package":       {Store: s, From: "debian:sid", Include: []string{"-o"}},
		"bad mirror":        {Store: s, From: "debian:sid", Mirrors: []string{"x"}},
		"negative age":      {Store: s, From: "debian:sid", MaxAge: -1},
		"negative size":     {Store: s, From: "debian:sid", MaxBytes: -1},
		"unsupported kind":  {Store: s, From: "qcow2:x"},
	} {
		if _, err := Build(t.Context(), o); !errors.Is(err, image.ErrInvalidOption) && !errors.Is(err, image.ErrUnsupportedSource) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	file := filepath.Join(t.TempDir(), "file")
	imagetest.Write(t, file, "")
	if _, err := image.OpenStore(file); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("a store at a file: got %v", err)
	}
}
