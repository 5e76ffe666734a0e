package early

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestParseCmdline_reads_what_concerns_the_agent(t *testing.T) {
	c, err := ParseCmdline("console=ttyS0 quiet drowse.image=/dev/vdb drowse.rw=/dev/vdc drowse.hostname=box " +
		"drowse.ip=10.0.0.2/24,10.0.0.1,1.1.1.1,fd00::1 drowse.ip6=fd00::2/64,fd00::1 drowse.wait=3 drowse.tmp=tmpfs drowse.quiet -- drowse.bogus\n")
	if err != nil {
		t.Fatal(err)
	}
	if c.Image != "/dev/vdb" || c.RW != "/dev/vdc" || c.Hostname != "box" || c.Wait != 3*time.Second || !c.TmpInRAM || !c.Quiet {
		t.Errorf("got %+v", c)
	}
	if n := c.Net; n == nil || n.Addr.String() != "10.0.0.2/24" || n.Gateway.String() != "10.0.0.1" || len(n.DNS) != 2 {
		t.Errorf("net %+v", c.Net)
	}
	if n := c.Net6; n == nil || n.Addr.String() != "fd00::2/64" || n.Gateway.String() != "fd00::1" {
		t.Errorf("IPv6 net %+v", c.Net6)
	}
}

func TestParseCmdline_refuses_what_it_cannot_do(t *testing.T) {
	for _, tt := range []struct{ line, want string }{
		{"", "no drowse.image"},
		{"drowse.image=vdb", "want a device"},
		{"drowse.image=/dev/vdb drowse.imgae=/dev/vdc", "not a word"},
		{"drowse.image=/dev/vdb drowse.ip=10.0.0.2", "IPv4 address with its prefix"},
		{"drowse.image=/dev/vdb drowse.ip=fd00::1/64", "IPv4 address with its prefix"},
		{"drowse.image=/dev/vdb drowse.ip=10.0.0.2/24,x", "gateway"},
		{"drowse.image=/dev/vdb drowse.ip=10.0.0.2/24,,x", "name server"},
		{"drowse.image=/dev/vdb drowse.ip=10.0.0.2/24,,1.1.1.1,1.1.1.1,1.1.1.1,1.1.1.1", "more than 3"},
		{"drowse.image=/dev/vdb drowse.ip6=10.0.0.2/24", "IPv6 address with its prefix"},
		{"drowse.image=/dev/vdb drowse.ip6=fd00::2", "IPv6 address with its prefix"},
		{"drowse.image=/dev/vdb drowse.ip6=::ffff:10.0.0.2/120", "IPv6 address with its prefix"},
		{"drowse.image=/dev/vdb drowse.ip6=fd00::2/64,10.0.0.1", "gateway"},
		{"drowse.image=/dev/vdb drowse.ip6=fd00::2/64,fe80::1%eth0", "gateway"},
		{"drowse.image=/dev/vdb drowse.ip6=fd00::2/64,fd00::1,fd00::3", "gateway"},
		{"drowse.image=/dev/vdb drowse.wait=-1", "seconds"},
		{"drowse.image=/dev/vdb drowse.volume=vol-1,rw", "SERIAL"},
		{"drowse.image=/dev/vdb drowse.share=share-0,rw", "TAG"},
		{"drowse.image=/dev/vdb drowse.share=share-0,rx,/data", "TAG"},
		{"drowse.image=/dev/vdb drowse.share=,ro,/data", "TAG"},
		{"drowse.image=/dev/vdb drowse.share=share-0,ro,/", "TAG"},
		{"drowse.image=/dev/vdb" + strings.Repeat(" drowse.share=a,ro,/b", 17), "more than 16"},
		{"drowse.image=/dev/vdb drowse.volume=,rw,/data", "SERIAL"},
		{"drowse.image=/dev/vdb drowse.volume=vol-1,wr,/data", "SERIAL"},
		{"drowse.image=/dev/vdb drowse.volume=vol-1,rw,data", "SERIAL"},
		{"drowse.image=/dev/vdb drowse.volume=vol-1,rw,/", "SERIAL"},
		{"drowse.image=/dev/vdb drowse.volume=vol-1,rw,/a/../b", "SERIAL"},
		{"drowse.image=/dev/vdb drowse.volume=" + strings.Repeat("x", 21) + ",rw,/data", "SERIAL"},
		{"drowse.image=/dev/vdb" + strings.Repeat(" drowse.volume=a,ro,/b", 17), "more than 16"},
		{"drowse.image=/dev/vdb drowse.tmp=disk", "tmpfs"},
		{"drowse.image=/dev/vdb drowse.hostname=" + strings.Repeat("x", 65), "64 bytes"},
	} {
		if _, err := ParseCmdline(tt.line); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q: %v, want %q", tt.line, err, tt.want)
		}
	}
}

func TestNetmask_of_every_length(t *testing.T) {
	for bits, want := range map[int][]byte{0: {0, 0, 0, 0}, 8: {255, 0, 0, 0}, 20: {255, 255, 240, 0}, 24: {255, 255, 255, 0}, 32: {255, 255, 255, 255}} {
		if got := netmask(bits); !bytes.Equal(got, want) {
			t.Errorf("/%d: %v", bits, got)
		}
	}
}

func TestParseCmdline_reads_volumes_in_their_order(t *testing.T) {
	c, err := ParseCmdline("drowse.image=/dev/vdb drowse.volume=vol-1,rw,/data drowse.volume=vol-2,ro,/srv/a,b")
	if err != nil {
		t.Fatal(err)
	}
	want := []Mount{{Name: "vol-1", Dir: "/data"}, {Name: "vol-2", Dir: "/srv/a,b", ReadOnly: true}}
	if !slices.Equal(c.Volumes, want) {
		t.Errorf("got %+v, want %+v", c.Volumes, want)
	}
}

func TestFindSerial_goes_by_the_serial_number(t *testing.T) {
	dir := t.TempDir()
	for name, serial := range map[string]string{"vda": "drowse-image\n", "vdb": "vol-2\n", "vdc": "vol-1"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name, "serial"), []byte(serial), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if dev, err := findSerial(dir, "vol-1", time.Now()); err != nil || dev != "/dev/vdc" {
		t.Errorf("got %q, %v", dev, err)
	}
	if dev, err := findSerial(dir, "vol-3", time.Now()); err == nil {
		t.Errorf("a disk that is not there was found as %s", dev)
	}
}

func TestParseCmdline_reads_shares_in_their_order(t *testing.T) {
	c, err := ParseCmdline("drowse.image=/dev/vdb drowse.share=share-0,rw,/data drowse.share=share-1,ro,/srv/a")
	want := []Mount{{Name: "share-0", Dir: "/data"}, {Name: "share-1", Dir: "/srv/a", ReadOnly: true}}
	if err != nil || !slices.Equal(c.Shares, want) {
		t.Errorf("%+v, %v; want %+v", c.Shares, err, want)
	}
}
