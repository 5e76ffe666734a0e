package net

import (
	"bytes"
	"encoding/binary"
	stdnet "net"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/drowse-vm/drowse/devices/net/tap"
	"github.com/drowse-vm/drowse/internal/test/devicetest"
)

// newTAP makes a TAP device in a new network namespace. The host is 10.9.0.1, the guest 10.9.0.2 with testMAC.
func newTAP(t testing.TB) *tap.Device {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("making TAP devices needs root")
	}
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		t.Skipf("the host has no TAP devices: %v", err)
	}
	runtime.LockOSThread() // never unlocked: the thread ends with the test
	ns, err := netns.New()
	if err != nil {
		t.Skipf("the host does not allow network namespaces: %v", err)
	}
	t.Cleanup(func() { ns.Close() })
	dev, err := tap.Create("drowse0")
	must(t, err)
	t.Cleanup(func() { must(t, dev.Close()) })
	link, err := netlink.LinkByName(dev.Name())
	must(t, err)
	must(t, netlink.LinkSetHardwareAddr(link, stdnet.HardwareAddr{2, 0, 0, 0, 0, 1}))
	must(t, netlink.AddrAdd(link, &netlink.Addr{IPNet: &stdnet.IPNet{IP: stdnet.IPv4(10, 9, 0, 1), Mask: stdnet.CIDRMask(24, 32)}}))
	must(t, dev.Up())
	must(t, netlink.NeighAdd(&netlink.Neigh{
		LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT,
		IP: stdnet.IPv4(10, 9, 0, 2), HardwareAddr: testMAC[:],
	}))
	return dev
}

// udp returns a frame from the guest to the host whose UDP checksum is left to the receiver, as Linux sends it.
func udp(port uint16, payload []byte) (header, frame []byte) {
	be := binary.BigEndian
	f := []byte{2, 0, 0, 0, 0, 1}
	f = append(f, testMAC[:]...)
	f = append(f, 8, 0, 0x45, 0)
	f = be.AppendUint16(f, uint16(28+len(payload)))
	f = append(f, 0, 0, 0, 0, 64, 17, 0, 0, 10, 9, 0, 2, 10, 9, 0, 1)
	be.PutUint16(f[24:], ^sum(f[14:34]))
	f = be.AppendUint16(f, 4000)
	f = be.AppendUint16(f, port)
	f = be.AppendUint16(f, uint16(8+len(payload)))
	// The sum of the pseudo header.
	pseudo := append([]byte{0, 17}, be.AppendUint16(nil, uint16(8+len(payload)))...)
	f = be.AppendUint16(f, sum(append(pseudo, f[26:34]...)))
	header = make([]byte, HeaderSize)
	header[headerFlags] = flagNeedsCsum
	binary.LittleEndian.PutUint16(header[headerCsumStart:], 34)
	binary.LittleEndian.PutUint16(header[headerCsumOffset:], 6)
	return header, append(f, payload...)
}

// sum returns the Internet checksum, not inverted.
func sum(p []byte) uint16 {
	s := uint32(0)
	for i := 0; i+1 < len(p); i += 2 {
		s += uint32(p[i])<<8 | uint32(p[i+1])
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return uint16(s)
}

func startOnTAP(t testing.TB, features uint64) (*devicetest.Driver, *Device) {
	dev := newTAP(t)
	mem := devicetest.NewMemory(t)
	d, err := New(mem, dev, Config{MAC: testMAC})
	must(t, err)
	drv := devicetest.NewDriver(t, d, mem)
	drv.Start(features)
	return drv, d
}

// nextUDP receives frames until a UDP frame arrives.
func nextUDP(d *devicetest.Driver) (header, payload []byte) {
	for {
		data, used := d.Queue(queueRX).Do(nil, 1700)
		f := data[HeaderSize:used]
		if len(f) > 42 && f[12] == 8 && f[13] == 0 && f[23] == 17 {
			return data[:HeaderSize], f[42:]
		}
	}
}

func TestUDP_crosses_a_TAP_both_ways(t *testing.T) {
	for name, features := range map[string]uint64{"with offloads": devicetest.AllFeatures, "without": 0} {
		t.Run(name, func(t *testing.T) {
			d, dev := startOnTAP(t, features)
			host, err := stdnet.ListenUDP("udp4", &stdnet.UDPAddr{IP: stdnet.IPv4(10, 9, 0, 1)})
			must(t, err)
			defer host.Close()
			must(t, host.SetDeadline(time.Now().Add(10*time.Second)))
			payload := bytes.Repeat([]byte("drowse "), 100)
			_, err = host.WriteToUDP(payload, &stdnet.UDPAddr{IP: stdnet.IPv4(10, 9, 0, 2), Port: 4000})
			must(t, err)
			header, got := nextUDP(d)
			if !bytes.Equal(got, payload) {
				t.Errorf("the guest got %q", got)
			}
			if offload := header[headerFlags]&flagNeedsCsum != 0; offload != (features != 0) {
				t.Errorf("header % x: is the checksum left to the guest?", header)
			}
			h, f := udp(uint16(host.LocalAddr().(*stdnet.UDPAddr).Port), payload)
			if features == 0 {
				// The frame carries a right checksum, which the host verifies.
				binary.BigEndian.PutUint16(f[40:], ^sum(append(f[34:], make([]byte, len(f)%2)...)))
				clear(h)
			}
			d.Queue(queueTX).Do([][]byte{h, f})
			buf := make([]byte, 2000)
			n, from, err := host.ReadFromUDP(buf)
			if err != nil || !bytes.Equal(buf[:n], payload) || from.String() != "10.9.0.2:4000" {
				t.Errorf("the host got %q from %v, %v", buf[:n], from, err)
			}
			if st := dev.Stats(); st.Refused.Load() != 0 || st.Malformed.Load() != 0 {
				t.Errorf("%+v", st)
			}
		})
	}
}

func TestTAP_that_is_removed_takes_the_link_down_until_the_guest_has_another(t *testing.T) {
	for name, notices := range map[string]func(*devicetest.Driver){
		"when it is read":      func(d *devicetest.Driver) { d.Queue(queueRX).Submit(nil, 1700) },
		"when the guest sends": func(d *devicetest.Driver) { d.Queue(queueTX).Do([][]byte{make([]byte, HeaderSize), frame(1, 100)}) },
	} {
		t.Run(name, func(t *testing.T) {
			d, dev := startOnTAP(t, devicetest.AllFeatures)
			status := func() uint16 { return binary.LittleEndian.Uint16(d.Config(configStatus, 2)) }
			link, err := netlink.LinkByName("drowse0")
			must(t, err)
			must(t, netlink.LinkDel(link))
			notices(d)
			until(t, "the guest's being told", func() bool { return d.ConfigChanges() == 1 })
			if st := d.Status(); status() != 0 || dev.Link() || st&devicetest.StatusNeedsReset != 0 || d.HostError() != nil {
				t.Errorf("the link is %d, the device's status %#x, %v", status(), st, d.HostError())
			}
			w := newWire(t)
			next, err := New(d.Mem(), w, Config{MAC: testMAC})
			must(t, err)
			must(t, d.Move(next))
			until(t, "the guest's being told of the next", func() bool { return d.ConfigChanges() == 2 })
			d.Queue(queueTX).Do([][]byte{make([]byte, HeaderSize), frame(2, 100)})
			if _, got := w.receive(t, 10*time.Second); serialOf(got) != 2 || status() != statusLinkUp {
				t.Errorf("the link is %d, and %d came out", status(), serialOf(got))
			}
		})
	}
}

func TestFlooded_TAP_does_not_freeze_when_buffers_come_back(t *testing.T) {
	d, _ := startOnTAP(t, allButTSO)
	host, err := stdnet.DialUDP("udp4", nil, &stdnet.UDPAddr{IP: stdnet.IPv4(10, 9, 0, 2), Port: 4000})
	must(t, err)
	defer host.Close()
	for range 5 {
		// More than the TAP's queue holds.
		for range 3000 {
			host.Write([]byte("flood"))
		}
		for range 300 {
			if _, got := nextUDP(d); string(got) != "flood" {
				t.Fatalf("got %q", got)
			}
		}
	}
	// The guest drains the rest, and a new packet gets through.
	host.Write([]byte("last"))
	for {
		if _, got := nextUDP(d); string(got) == "last" {
			return
		}
		host.Write([]byte("last"))
	}
}

func TestFrames_that_the_kernel_refuses_are_counted(t *testing.T) {
	d, dev := startOnTAP(t, devicetest.AllFeatures)
	links, err := netlink.LinkList()
	must(t, err)
	for _, l := range links {
		if l.Type() == "tuntap" {
			must(t, netlink.LinkSetDown(l))
		}
	}
	h, f := udp(9, []byte("nobody hears"))
	d.Queue(queueTX).Do([][]byte{h, f})
	if st := dev.Stats(); st.Refused.Load() != 1 || st.FramesFromGuest.Load() != 0 {
		t.Errorf("%+v", st)
	}
}
