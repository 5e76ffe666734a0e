package pager

import (
	"bytes"
	"sync"
	"testing"
)

// A handler wakes the waiters for a page before it has noted that the page is present. The source has what they
// write before the handler notes it. The test holds up the handler at that moment, for a page with content in the
// snapshot and for a zero page.
func TestA_source_has_what_was_written_before_the_handler_had_noted_the_page(t *testing.T) {
	dir := makeSnapshot(t, 64<<20, smallRAM)
	for _, tt := range []struct {
		name string
		page uint64
	}{
		{"stored in the snapshot", 100},
		{"zeros in the snapshot", 3010},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, mem := restore(t, dir, Options{})
			c, i := p.chunk(tt.page/chunkPages), int(tt.page%chunkPages)
			w, err := p.getWorker()
			if err != nil {
				t.Fatal(err)
			}
			defer p.putWorker(w)
			want := bytes.Repeat([]byte{0x5a}, pageSize)
			o := newToucher(t)
			src, err := p.Source()
			if err != nil {
				t.Fatal(err)
			}
			defer src.Close()
			got := make([]byte, pageSize)
			var read sync.WaitGroup
			c.mu.Lock()
			if err := w.fill.copy(p.hva(tt.page), bytes.Repeat([]byte{1}, pageSize)); err != nil {
				t.Error(err)
			}
			// Write by a system call, as the guest's writes come: without Ensure.
			if err := o.write(mem, gpaOf(t, mem, tt.page), want); err != nil {
				t.Error(err)
			}
			asked := make(chan struct{})
			read.Go(func() {
				close(asked)
				err = src.ReadPages(tt.page, got)
			})
			<-asked
			c.setPresent(i, 1)
			c.mu.Unlock()
			read.Wait()
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, want) {
				t.Errorf("the source has %x, want %x", got[:8], want[:8])
			}
		})
	}
}
