package early

import (
	"bytes"
	"strings"
	"testing"
	"time"
)

func TestParseCmdline_reads_what_concerns_the_agent(t *testing.T) {
	c, err := ParseCmdline("console=ttyS0 quiet drowse.image=/dev/vdb drowse.rw=/dev/vdc drowse.hostname=box " +
		"drowse.ip=10.0.0.2/24,10.0.0.1,1.1.1.1,fd00::1 drowse.wait=3 drowse.tmp=tmpfs drowse.quiet -- drowse.bogus\n")
	if err != nil {
		t.Fatal(err)
	}
	if c.Image != "/dev/vdb" || c.RW != "/dev/vdc" || c.Hostname != "box" || c.Wait != 3*time.Second || !c.TmpInRAM || !c.Quiet {
		t.Errorf("got %+v", c)
	}
	if n := c.Net; n == nil || n.Addr.String() != "10.0.0.2/24" || n.Gateway.String() != "10.0.0.1" || len(n.DNS) != 2 {
		t.Errorf("net %+v", c.Net)
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
		{"drowse.image=/dev/vdb drowse.wait=-1", "seconds"},
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
