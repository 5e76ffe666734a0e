package console

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/internal/test/devicetest"
)

// The host's writer takes nothing, and the guest goes on to print: each request waits for the writer, but no pause waits for that,
// and nothing is lost by it.
func TestAttack_pause_does_not_wait_for_the_patience_of_each_request(t *testing.T) {
	w := newStuckWriter()
	d, dev := start(t, w)
	dev.patience = devicetest.Timeout * 4 // for each of them
	var want bytes.Buffer
	for i := range 40 {
		p := bytes.Repeat([]byte{byte('a' + i%26)}, 32<<10)
		want.Write(p)
		d.Queue(queueTransmit).Submit([][]byte{p})
	}
	for range 3 {
		begin := time.Now()
		ctx, cancel := context.WithTimeout(context.Background(), devicetest.Timeout)
		err := d.Transport().Pause(ctx)
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("the pause took %v", time.Since(begin))
		if err := d.Transport().Resume(); err != nil {
			t.Fatal(err)
		}
	}
	w.release()
	devicetest.WaitFor(t, "the output", func() bool { return len(w.String()) == want.Len() })
	if w.String() != want.String() || dev.Stats().OutputDropped != 0 {
		t.Errorf("the output differs, or was dropped: %+v", dev.Stats())
	}
}
