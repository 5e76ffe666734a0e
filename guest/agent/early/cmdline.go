package early

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Config is what the kernel command line asks for.
type Config struct {
	Image    string // device of the EROFS image
	RW       string // device of the writable disk; "" for a tmpfs
	Hostname string
	Net      *Net // nil leaves eth0 alone
	Net6     *Net // the same for IPv6, without name servers
	Wait     time.Duration
	TmpInRAM bool
	Quiet    bool
	Volumes  []Mount // in the order in which they are mounted
	Shares   []Mount // the same; after the volumes
}

// Net is the static address of eth0.
type Net struct {
	Addr    netip.Prefix
	Gateway netip.Addr // not valid when there is none
	DNS     []netip.Addr
}

const (
	defaultWait = 10 * time.Second
	maxWait     = 600 // seconds
	maxHostname = 64  // bytes, __NEW_UTS_LEN
	maxDNS      = 3   // MAXNS of resolv.conf(5)
)

// ParseCmdline reads the drowse.* words of a kernel command line. Other words
// are left to the kernel; an unknown drowse.* word is an error, since a
// mistyped one would silently do nothing.
func ParseCmdline(line string) (Config, error) {
	c := Config{Wait: defaultWait}
	for _, word := range strings.Fields(line) {
		word = strings.ReplaceAll(word, `"`, "")
		if word == "--" {
			break
		}
		key, ok := strings.CutPrefix(word, "drowse.")
		if !ok {
			continue
		}
		key, value, _ := strings.Cut(key, "=")
		if err := c.set(key, value); err != nil {
			return c, fmt.Errorf("kernel command line: drowse.%s=%s: %w", key, value, err)
		}
	}
	if c.Image == "" {
		return c, fmt.Errorf("kernel command line: no drowse.image=DEVICE, which names the root image")
	}
	return c, nil
}

func (c *Config) set(key, value string) error {
	switch key {
	case "image", "rw":
		if !filepath.IsAbs(value) {
			return fmt.Errorf("want a device such as /dev/vdb")
		}
		if key == "image" {
			c.Image = value
		} else {
			c.RW = value
		}
	case "hostname":
		if value == "" || len(value) > maxHostname {
			return fmt.Errorf("want 1 to %d bytes", maxHostname)
		}
		c.Hostname = value
	case "ip":
		n, err := parseNet(value)
		if err != nil {
			return err
		}
		c.Net = n
	case "ip6":
		n, err := parseNet6(value)
		if err != nil {
			return err
		}
		c.Net6 = n
	case "wait":
		s, err := strconv.Atoi(value)
		if err != nil || s < 0 || s > maxWait {
			return fmt.Errorf("want 0 to %d seconds", maxWait)
		}
		c.Wait = time.Duration(s) * time.Second
	case "tmp":
		if value != "tmpfs" {
			return fmt.Errorf("want tmpfs")
		}
		c.TmpInRAM = true
	case "volume":
		return addMount(&c.Volumes, "volumes", "SERIAL", maxSerial, value)
	case "share":
		return addMount(&c.Shares, "shares", "TAG", maxTag, value)
	case "quiet":
		c.Quiet = true
	default:
		return fmt.Errorf("not a word that this agent knows")
	}
	return nil
}

// addMount reads NAME,rw,DIR or NAME,ro,DIR, where what says what the name is, of at most so many bytes.
func addMount(to *[]Mount, kind, what string, most int, value string) error {
	name, rest, _ := strings.Cut(value, ",")
	mode, dir, _ := strings.Cut(rest, ",")
	if name == "" || len(name) > most || mode != "rw" && mode != "ro" || !filepath.IsAbs(dir) || filepath.Clean(dir) != dir || dir == "/" {
		return fmt.Errorf("want %[1]s,rw,/DIR or %[1]s,ro,/DIR", what)
	}
	if len(*to) == maxMounts {
		return fmt.Errorf("more than %d %s", maxMounts, kind)
	}
	*to = append(*to, Mount{Name: name, Dir: dir, ReadOnly: mode == "ro"})
	return nil
}

// parseNet6 reads ADDRESS/BITS[,GATEWAY].
func parseNet6(value string) (*Net, error) {
	addr, gateway, _ := strings.Cut(value, ",")
	return parseAddr(addr, gateway, "an IPv6 address", "fd00::2/64", func(a netip.Addr) bool { return a.Is6() && !a.Is4In6() && a.Zone() == "" })
}

// parseAddr reads an address with its prefix length, and a gateway if there is one, of the family is.
func parseAddr(addr, gateway, what, as string, is func(netip.Addr) bool) (*Net, error) {
	prefix, err := netip.ParsePrefix(addr)
	if err != nil || !is(prefix.Addr()) {
		return nil, fmt.Errorf("want %s with its prefix length, as %s", what, as)
	}
	n := &Net{Addr: prefix}
	if gateway != "" {
		if n.Gateway, err = netip.ParseAddr(gateway); err != nil || !is(n.Gateway) {
			return nil, fmt.Errorf("gateway %q is not %s", gateway, what)
		}
	}
	return n, nil
}

func parseNet(value string) (*Net, error) {
	parts := append(strings.Split(value, ","), "")
	n, err := parseAddr(parts[0], parts[1], "an IPv4 address", "10.0.0.2/24", netip.Addr.Is4)
	if err != nil {
		return nil, err
	}
	for _, s := range parts[min(2, len(parts)-1) : len(parts)-1] {
		dns, err := netip.ParseAddr(s)
		if err != nil {
			return nil, fmt.Errorf("name server %q is not an IP address", s)
		}
		if n.DNS = append(n.DNS, dns); len(n.DNS) > maxDNS {
			return nil, fmt.Errorf("more than %d name servers", maxDNS)
		}
	}
	return n, nil
}
