package link_test

import (
	"testing"

	. "github.com/drowse-vm/drowse/netpolicy"
	. "github.com/drowse-vm/drowse/netpolicy/link"
)

// An attacker opens and closes connections without end, answers none, or sends datagrams from ever new ports.
// Established connections stay, even idle ones.
func TestAttack_flood_of_short_flows_evicts_established_ones(t *testing.T) {
	const room, established, flood = 1024, 200, 20000
	for _, x := range []struct {
		what   string
		frames func(port uint16) (dirs []Direction, frames [][]byte)
	}{
		{"datagrams without an answer", func(port uint16) ([]Direction, [][]byte) {
			return []Direction{Egress}, [][]byte{sent(peer4, 17, udp(port, 9))}
		}},
		{"connections that are not answered", func(port uint16) ([]Direction, [][]byte) {
			return []Direction{Ingress}, [][]byte{got(peer4, 6, tcp(port, 80, syn))}
		}},
		{"connections that are refused", func(port uint16) ([]Direction, [][]byte) {
			return []Direction{Ingress, Egress}, [][]byte{got(peer4, 6, tcp(port, 80, syn)), sent(peer4, 6, tcp(80, port, rst|ack))}
		}},
		{"connections that are closed at once", func(port uint16) ([]Direction, [][]byte) {
			return []Direction{Ingress, Egress, Ingress}, [][]byte{
				got(peer4, 6, tcp(port, 80, syn)), sent(peer4, 6, tcp(80, port, syn|ack)), got(peer4, 6, tcp(port, 80, rst|ack)),
			}
		}},
		{"pings", func(port uint16) ([]Direction, [][]byte) {
			return []Direction{Egress}, [][]byte{sent(peer4, 1, echo(8, port))}
		}},
	} {
		t.Run(x.what, func(t *testing.T) {
			e := newEngine(t, room)
			if err := e.Install(compile(t, "{default: {egress: allow, ingress: allow}, limits: {egress: {connections: {per_second: 1000000, burst: 1000000}}}}")); err != nil {
				t.Fatal(err)
			}
			if err := e.SetTime(1e15); err != nil {
				t.Fatal(err)
			}
			run := func(d Direction, frame []byte) Ran {
				t.Helper()
				r, err := e.Run(d, frame, 0)
				if err != nil {
					t.Fatal(err)
				}
				return r
			}
			for i := range uint16(established) {
				if i%2 == 0 {
					run(Egress, sent(peer4, 6, tcp(100+i, 443, syn)))
					run(Ingress, got(peer4, 6, tcp(443, 100+i, syn|ack)))
					continue
				}
				run(Egress, sent(peer4, 17, udp(100+i, 443)))
				run(Ingress, got(peer4, 17, udp(443, 100+i)))
			}
			for i := range flood {
				dirs, frames := x.frames(uint16(1000 + i))
				for j, d := range dirs {
					if r := run(d, frames[j]); r.Action != 0 {
						t.Fatalf("frame %d of flow %d: %s by %s", j, i, r.Verdict, r.Reason)
					}
				}
			}
			gone := 0
			for i := range uint16(established) {
				var r Ran
				if i%2 == 0 {
					r = run(Ingress, got(peer4, 6, tcp(443, 100+i, ack)))
				} else {
					r = run(Ingress, got(peer4, 17, udp(443, 100+i)))
				}
				if r.Reason != ReasonFlow {
					gone++
				}
			}
			if gone != 0 {
				t.Errorf("%d of %d flows that were established are gone", gone, established)
			}
		})
	}
}
