package vmm

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/drowse-vm/drowse/snapshot/pager"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// Whatever the guest does meanwhile, a capture has the bytes of the moment when the guest was paused.
func TestA_frozen_view_keeps_its_bytes_while_the_guest_writes(t *testing.T) {
	for _, how := range []struct {
		name string
		opts pager.FreezeOptions
	}{
		{"copied", pager.FreezeOptions{Expect: 80 << 20 / guestmem.PageSize}},
		// Too little for all RAM, enough for what the guest can overwrite.
		{"protected", pager.FreezeOptions{CopyBytes: 10 << 20}},
	} {
		for _, mode := range scribbleModes {
			t.Run(how.name+", "+mode.name, func(t *testing.T) {
				m := startScribbler(t, mode)
				if how.name == "protected" {
					if err := m.Memory().Write(0x400000, bytes.Repeat([]byte{0xa5}, 11<<20)); err != nil {
						t.Fatal(err)
					}
				}
				var image []byte
				saved := uint64(0)
				for range 6 {
					scribble(t, m, 100)
					var f *pager.Frozen
					f, image = freezeNow(t, m, mode, how.opts, image)
					checkFrozen(t, m, mode, f, image)
					st := f.Stats()
					saved += st.Saved
					if st.Protected != (how.name == "protected") {
						t.Errorf("%+v", st)
					}
					if err := f.Close(); err != nil {
						t.Fatal(err)
					}
					// Mark everything again, so that there is always much to do.
					all := guestmem.NewPageSet(m.Memory().Size() / guestmem.PageSize)
					all.Add(0, all.Pages())
					m.MarkDirty(all)
				}
				t.Logf("%d pages saved before they were overwritten", saved)
				if how.name == "protected" && saved == 0 {
					t.Error("the guest has overwritten nothing: this test shows nothing")
				}
				scribble(t, m, 100)
			})
		}
	}
}

// freezeNow does what a capture does. The machine runs when it returns.
func freezeNow(t *testing.T, m *Machine, mode scribbleMode, o pager.FreezeOptions, image []byte) (*pager.Frozen, []byte) {
	t.Helper()
	f, err := pager.Prepare(m.Memory(), nil, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := m.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, err = m.Export()
	set, terr := m.TakeDirty()
	if err := errors.Join(err, terr); err != nil {
		t.Fatal(err)
	}
	image = ramImage(t, m, mode, image)
	if err := errors.Join(f.Freeze(set), m.Resume()); err != nil {
		t.Fatal(err)
	}
	return f, image
}

// checkFrozen reads the view in pieces, in random order, while the guest writes.
func checkFrozen(t *testing.T, m *Machine, mode scribbleMode, f *pager.Frozen, image []byte) {
	t.Helper()
	atData, err := m.Memory().Linear(mode.data)
	if err != nil {
		t.Fatal(err)
	}
	type run struct{ first, end uint64 }
	var runs []run
	for page := uint64(0); ; {
		first, end, err := f.NextData(page)
		if err != nil {
			t.Fatal(err)
		}
		if first == end {
			break
		}
		for page = first; page < end; page = min(page+32, end) {
			runs = append(runs, run{page, min(page+32, end)})
		}
	}
	rand.Shuffle(len(runs), func(i, j int) { runs[i], runs[j] = runs[j], runs[i] })
	buf, wrong := make([]byte, 32*guestmem.PageSize), 0
	for i, r := range runs {
		p := buf[:(r.end-r.first)*guestmem.PageSize]
		if err := f.ReadPages(r.first, p); err != nil {
			t.Fatal(err)
		}
		for page := r.first; page < r.end; page, p = page+1, p[guestmem.PageSize:] {
			off := page * guestmem.PageSize
			if off >= lowRAM {
				if off -= atData; off >= (scribblePages+1)*guestmem.PageSize {
					continue
				}
				off += lowRAM
			}
			if !bytes.Equal(p[:guestmem.PageSize], image[off:off+guestmem.PageSize]) {
				wrong++
			}
		}
		f.Release(r.first, r.end)
		if i%16 == 0 {
			scribble(t, m, 1)
		}
	}
	if wrong > 0 {
		t.Errorf("%d pages are not as they were when the guest was paused", wrong)
	}
}

func TestA_second_capture_is_refused_while_there_is_one(t *testing.T) {
	m := startScribbler(t, scribbleModes[0])
	f, err := pager.Prepare(m.Memory(), nil, pager.FreezeOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pager.Prepare(m.Memory(), nil, pager.FreezeOptions{}); !errors.Is(err, pager.ErrBusy) {
		t.Errorf("second capture: got %v, want ErrBusy", err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if f, err = pager.Prepare(m.Memory(), nil, pager.FreezeOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}
