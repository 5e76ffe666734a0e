package sandboxtest_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/limits"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// noise is content that does not compress.
func noise(seed uint64, n int) []byte {
	b, r := make([]byte, n), rand.New(rand.NewPCG(seed, 0))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

func TestQuota_holds_for_all_that_a_sandbox_stores_and_it_can_always_sleep(t *testing.T) {
	h := (&sandboxtest.VMs{}).Host(t)
	const quota = 700 // MiB
	b := create(t, h, sandbox.Spec{Name: "a", MemoryMiB: 64, DiskQuotaMiB: quota})
	r := want(t, h, "a", state.Running)
	if r.Spec.DiskMiB != r.Spec.MaxDisk(quota) {
		t.Errorf("its disk has %d MiB, want %d", r.Spec.DiskMiB, r.Spec.MaxDisk(quota))
	}
	// What the host has allocated, counted as du does: layers, snapshots, and the VM's own directory.
	stored := func() (n int64) {
		t.Helper()
		for _, dir := range []string{h.State.LayerDir(), filepath.Join(h.State.Dir(), "snapshots"), h.State.VMDir("a")} {
			all, _ := state.DiskUsage(dir)
			n += all
		}
		if n > quota<<20 {
			t.Fatalf("the host stores %d MiB, and the quota is %d", n>>20, quota)
		}
		return n
	}
	write := func(seed uint64) error {
		return client(t, b).WriteFile(t.Context(), "/root/x", bytes.NewReader(noise(seed, 24<<20)), guest.WriteOptions{})
	}
	// Each snapshot keeps what the guest has overwritten since.
	var ids []string
	var refused error
	for i := range uint64(30) {
		if err := write(i); err != nil {
			t.Fatal(err)
		}
		stored()
		res, err := b.Snapshot(t.Context(), spec.SnapshotOptions{})
		stored()
		if refused = err; err != nil {
			break
		}
		ids = append(ids, res.Snapshot)
	}
	if !errors.Is(refused, spec.ErrQuota) || len(ids) < 2 {
		t.Fatalf("%d snapshots, then %v; want some, and then ErrQuota", len(ids), refused)
	}
	if _, err := b.Fork(t.Context(), sandbox.ForkOptions{Count: 1}); !errors.Is(err, spec.ErrQuota) {
		t.Errorf("a fork: %v", err)
	}
	if _, err := b.Sleep(t.Context(), spec.SleepOptions{}); err != nil {
		t.Fatal("it cannot sleep: ", err)
	}
	before := stored()
	// It wakes and writes until the quota is used up. Then it sleeps.
	for i := uint64(100); ; i++ {
		if i == 130 {
			t.Fatal("the quota is never used up")
		}
		if _, err := b.Wake(t.Context()); errors.Is(err, spec.ErrQuota) {
			break
		} else if err != nil && !errors.Is(err, spec.ErrRunning) {
			t.Fatal(err)
		}
		err := write(i)
		stored()
		if err != nil {
			awaitPhase(t, h, "a", state.Asleep)
			stored()
			continue
		}
		if _, err := b.Sleep(t.Context(), spec.SleepOptions{}); err != nil && !errors.Is(err, spec.ErrNotRunning) {
			t.Fatal("it cannot sleep: ", err)
		}
		stored()
	}
	if after := stored(); after < before {
		t.Errorf("it has %d MiB, and had %d", after>>20, before>>20)
	}
	// Removing snapshots gives room.
	for _, id := range ids {
		if err := h.State.RemoveSnapshot(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := b.Wake(t.Context()); err != nil {
		t.Fatalf("with %d MiB after its snapshots were removed: %v", stored()>>20, err)
	}
	if err := write(1000); err != nil {
		t.Error(err)
	}
	// The replaced content is given up with the next sleep.
	for i := uint64(2000); ; i++ {
		if _, err := b.Sleep(t.Context(), spec.SleepOptions{}); err != nil {
			t.Fatal(err)
		}
		if n := stored(); n < 150<<20 {
			break
		} else if i == 2100 { // layers are joined in the background, which a sleep interrupts
			t.Fatalf("it still has %d MiB", n>>20)
		}
		if _, err := b.Wake(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := b.Wake(t.Context()); err != nil {
		t.Fatal(err)
	}
	st, err := b.Stats(t.Context())
	if err != nil || st.Host.DiskQuota != quota<<20 || st.Host.DiskUsed > stored()+1<<20 || st.Host.DiskUsed < 24<<20 {
		t.Errorf("it has stored %d, and its stats are %+v, %v", stored(), st.Host, err)
	}
}

func TestQuota_holds_for_promotions_and_decompressed_pages_which_are_given_up_first(t *testing.T) {
	const quota, pages = 700, 2048 // MiB, and pages of memory
	h := (&sandboxtest.VMs{Pages: pages}).Host(t)
	to := t.TempDir()
	s := sandbox.Spec{Name: "a", Image: sandboxtest.Image, MemoryMiB: 64, DiskQuotaMiB: quota}
	m := &spec.Metadata{Persist: lifetime.Persist{Promote: []lifetime.Promotion{{Path: "/root", To: to}}}}
	if _, err := h.Create(t.Context(), s, sandbox.CreateOptions{Metadata: m}); err != nil {
		t.Fatal(err)
	}
	b := h.Sandbox("a")
	stored := func() (n int64) {
		t.Helper()
		for _, dir := range []string{h.State.LayerDir(), filepath.Join(h.State.Dir(), "snapshots"), h.State.VMDir("a"), h.State.PageCacheDir(), to} {
			all, _ := state.DiskUsage(dir)
			n += all
		}
		if n > quota<<20 {
			t.Fatalf("the host stores %d MiB, and the quota is %d", n>>20, quota)
		}
		return n
	}
	cached := func() bool {
		files, _ := filepath.Glob(filepath.Join(h.State.PageCacheDir(), "[0-9a-f]*")) // not those that are being written
		return len(files) > 0
	}
	counts := func() {
		t.Helper()
		r := want(t, h, "a", state.Running)
		u, err := h.State.DiskUse(t.Context(), r)
		if n := stored(); err != nil || u.Bytes > n || u.Bytes < n-1<<20 {
			t.Errorf("the host stores %d, and %d count, %v", n, u.Bytes, err)
		}
		if all, err := h.State.QuotaUses(t.Context()); err != nil || len(all) != 1 || all[0] != (state.QuotaUse{Name: "a", Quota: quota << 20, Used: u.Bytes}) {
			t.Errorf("the figures are %+v, %v", all, err)
		}
	}
	write := func(name string, seed uint64, n int) {
		t.Helper()
		if err := client(t, b).WriteFile(t.Context(), name, bytes.NewReader(noise(seed, n)), guest.WriteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	// Decompressed pages count.
	if _, err := b.Sleep(t.Context(), spec.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	before := stored()
	if _, err := b.Wake(t.Context()); err != nil {
		t.Fatal(err)
	}
	for !cached() {
		select {
		case <-t.Context().Done():
			t.Fatal("no page is kept")
		case <-time.After(10 * time.Millisecond):
		}
	}
	counts()
	if n := stored(); n < before+pages*4096 {
		t.Errorf("the host stores %d, and before the pages it was %d", n, before)
	}
	// So do promotions, of the large and of the small, until there is no room for another.
	write("/root/x", 1, 24<<20)
	for i := range uint64(100) {
		write("/root/"+strconv.Itoa(int(i)), i, 1)
	}
	var refused error
	copies := 0
	for refused == nil && copies < 30 {
		_, refused = b.Promote(t.Context())
		counts()
		copies++
	}
	overQuota := func(err error) bool {
		return errors.Is(err, spec.ErrPromote) && strings.Contains(err.Error(), "disk quota")
	}
	if !overQuota(refused) || copies < 3 {
		t.Fatalf("%d promotions, then %v; want some, and then that the quota is used up", copies, refused)
	}
	if _, err := b.Snapshot(t.Context(), spec.SnapshotOptions{}); !errors.Is(err, spec.ErrQuota) || cached() {
		t.Errorf("a snapshot: %v; and decompressed pages are kept: %t", err, cached())
	}
	if _, err := b.Sleep(t.Context(), spec.SleepOptions{}); !overQuota(err) {
		t.Errorf("a sleep that cannot promote: %v", err)
	}
	counts()
	if _, err := b.Sleep(t.Context(), spec.SleepOptions{Hooks: spec.HooksSkip}); err != nil {
		t.Fatal("it cannot sleep without: ", err)
	}
	stored()
	// Taking copies away gives room.
	if err := os.RemoveAll(filepath.Join(to, "a")); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Wake(t.Context()); err != nil {
		t.Fatal(err)
	}
	res, err := b.Sleep(t.Context(), spec.SleepOptions{})
	if err != nil || res.Persist == nil || len(res.Persist.Promoted) != 1 {
		t.Errorf("with room again: %+v, %v", res.Persist, err)
	}
	stored()
}

func awaitPhase(t *testing.T, h *sandbox.Host, name string, phase state.Phase) {
	t.Helper()
	for {
		if r, err := h.State.Get(name); err == nil && r.Phase == phase {
			return
		}
		select {
		case <-t.Context().Done():
			t.Fatalf("%s is never %s", name, phase)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func TestQuota_of_a_class_sizes_disks_or_refuses_them(t *testing.T) {
	h := (&sandboxtest.VMs{}).Host(t)
	l := limits.Default
	l.Classes = map[lifetime.Class]limits.Sandbox{lifetime.Ephemeral: {DiskMiB: 600}}
	if err := l.Write(h.State.Dir()); err != nil {
		t.Fatal(err)
	}
	s := sandbox.Spec{Name: "a", Image: sandboxtest.Image, MemoryMiB: 64}
	ephemeral := sandbox.CreateOptions{Metadata: &spec.Metadata{Class: lifetime.Ephemeral}}
	if _, err := h.Create(t.Context(), s, ephemeral); err != nil {
		t.Fatal(err)
	}
	if r := want(t, h, "a", state.Running); r.Spec.DiskMiB != s.MaxDisk(600) {
		t.Errorf("a disk of %d MiB", r.Spec.DiskMiB)
	}
	s.Name, s.DiskMiB = "b", 400
	if _, err := h.Create(t.Context(), s, ephemeral); !errors.Is(err, spec.ErrQuota) {
		t.Errorf("a disk that is too large: %v", err)
	}
	if _, err := h.Create(t.Context(), s, sandbox.CreateOptions{}); err != nil {
		t.Errorf("of another class: %v", err)
	}
}
