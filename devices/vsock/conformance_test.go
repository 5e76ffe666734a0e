package vsock

import (
	"path/filepath"
	"testing"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/internal/test/devicetest"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// probe returns a packet of a connection that does not exist. The device must answer it with a reset.
func probe(port uint32) []byte {
	var raw [headerSize]byte
	h := header{srcCID: testCID, dstCID: HostCID, srcPort: port, dstPort: ^port, typ: typeStream, op: opCreditUpdate}
	h.encode(&raw)
	return raw[:]
}

func TestConformance(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a minute")
	}
	// The device answers every packet without a connection exactly once, whatever happens in between. Pauses and
	// moves must not lose or repeat any. (Connections do not survive a move; other tests are about them.)
	var serial uint32
	exercise := func(t testing.TB, d *devicetest.Driver) {
		const batch = 40
		rx, tx := d.Queue(queueRX), d.Queue(queueTX)
		first := serial
		serial += batch
		var posted, sent []*devicetest.Request
		for range batch {
			posted = append(posted, rx.Submit(nil, 30, 300))
		}
		for port := first; port != serial; port++ {
			raw := probe(port)
			sent = append(sent, tx.Submit([][]byte{raw[:20], raw[20:]}))
		}
		for _, r := range sent {
			if _, used := r.Wait(); used != 0 {
				t.Fatalf("%d bytes written to a packet", used)
			}
		}
		seen := map[uint32]bool{}
		for _, r := range posted {
			data, used := r.Wait()
			var h header
			h.decode((*[headerSize]byte)(data))
			if used != headerSize || h.op != opReset || h.srcCID != HostCID || h.dstCID != testCID || h.srcPort != ^h.dstPort {
				t.Fatalf("%d bytes, %+v", used, h)
			}
			if h.dstPort < first {
				continue // of an earlier call that a reset cut short
			}
			if seen[h.dstPort] {
				t.Fatalf("a second answer to packet %d", h.dstPort)
			}
			seen[h.dstPort] = true
		}
		for port := first; port != serial; port++ {
			if !seen[port] {
				t.Fatalf("no answer to packet %d", port)
			}
		}
	}
	devicetest.Run(t, devicetest.Case{
		New: func(t testing.TB, mem *guestmem.Memory) devices.Device {
			// Each device has its own path, as in another process.
			dev, err := New(mem, Config{CID: testCID, Path: filepath.Join(t.TempDir(), "v")})
			must(t, err)
			t.Cleanup(func() { must(t, dev.Close()) })
			return dev
		},
		Exercise: exercise,
		Idle: map[int]func(testing.TB, *devicetest.Driver){
			queueRX: func(_ testing.TB, d *devicetest.Driver) {
				serial++
				d.Queue(queueTX).Submit([][]byte{probe(serial)})
			},
			queueEvent: nil,
		},
	})
}
