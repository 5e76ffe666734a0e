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
	Shares   []Mount // the same; mounted after the volumes
}

// Net is the static address of eth0.
type Net struct {
	Addr    netip.Prefix
	Gateway netip.Addr // not valid if there is none
	DNS     []netip.Addr
}

const (
	defaultWait = 10 * time.Second
	maxWait     = 600 // seconds
	maxHostname = 64  // bytes, __NEW_UTS_LEN
	maxDNS      = 3   // MAXNS of resolv.conf(5)
)

// ParseCmdline reads the drowse.* words of a kernel command line, and ignores the kernel's own words. An unknown
// drowse.* word is an error, since a mistyped one would silently do nothing.
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

func (c *Config) set(key, value string) (err error) {
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
		c.Net, err = parseNet(value, "an IPv4 address", "10.0.0.2/24", maxDNS, netip.Addr.Is4)
	case "ip6":
		c.Net6, err = parseNet(value, "an IPv6 address", "fd00::2/64", 0, func(a netip.Addr) bool {
			return a.Is6() && !a.Is4In6() && a.Zone() == ""
		})
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
	return err
}

// addMount reads NAME,rw,DIR or NAME,ro,DIR. what describes NAME, which has at most most bytes.
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

// parseNet reads ADDRESS/BITS[,GATEWAY[,DNS...]], at most servers name servers. is checks an address's family.
func parseNet(value, what, as string, servers int, is func(netip.Addr) bool) (*Net, error) {
	parts := strings.Split(value, ",")
	prefix, err := netip.ParsePrefix(parts[0])
	if err != nil || !is(prefix.Addr()) {
		return nil, fmt.Errorf("want %s with its prefix length, as %s", what, as)
	}
	n := &Net{Addr: prefix}
	for i, s := range parts[1:] {
		switch a, err := netip.ParseAddr(s); {
		case i == 0 && s == "": // none
		case i == 0 && (err != nil || !is(a)):
			return nil, fmt.Errorf("gateway %q is not %s", s, what)
		case i == 0:
			n.Gateway = a
		case i > servers:
			return nil, fmt.Errorf("more than %d name servers behind the gateway", servers)
		case err != nil:
			return nil, fmt.Errorf("name server %q is not an IP address", s)
		default:
			n.DNS = append(n.DNS, a)
		}
	}
	return n, nil
}
