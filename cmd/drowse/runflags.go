package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// stageBoot is the stage of a boot in a progress.
const stageBoot = "boot"

// dockerNames gives flags of docker the names that they have here.
func dockerNames(_ *pflag.FlagSet, name string) pflag.NormalizedName {
	switch name {
	case "network":
		name = "net"
	case "cpus":
		name = "vcpus"
	}
	return pflag.NormalizedName(name)
}

// mebibytes is a flag for a size of memory or disk.
type mebibytes int

func (m *mebibytes) String() string {
	if *m == 0 {
		return ""
	}
	return strconv.Itoa(int(*m))
}

// Type returns the help's word for the value.
func (*mebibytes) Type() string { return "size" }

// Set reads 512, 512m, 2g, 2GiB or, as docker does, a number of bytes that no VM could have as MiB.
func (m *mebibytes) Set(s string) error {
	n, bare, ok := parseSize(s)
	if !bare || n >= 1<<26 {
		n >>= 20
	}
	if !ok || n > 1<<30 {
		return fmt.Errorf("%q is no size: use one as 512m or 2g; a number alone is MiB", s)
	}
	*m = mebibytes(n)
	return nil
}

// parseSize reads a number of bytes with a unit, as 512m, 512MB or 512MiB, or a bare number. Units are powers of 1024.
func parseSize(s string) (n int64, bare, ok bool) {
	digits := strings.TrimRight(s, "bBiIkKmMgGtT")
	n, err := strconv.ParseInt(digits, 10, 64)
	shift, ok := map[string]int{
		"": 0, "b": 0, "k": 10, "kb": 10, "kib": 10, "m": 20, "mb": 20, "mib": 20, "g": 30, "gb": 30, "gib": 30, "t": 40, "tb": 40, "tib": 40,
	}[strings.ToLower(s[len(digits):])]
	return n << shift, digits == s, ok && err == nil && n >= 0 && n <= math.MaxInt64>>shift
}

// cpus is a flag for a number of CPUs.
type cpus int

func (c *cpus) String() string {
	if *c == 0 {
		return ""
	}
	return strconv.Itoa(int(*c))
}

// Type returns the help's word for the value.
func (*cpus) Type() string { return "int" }

// Set reads a whole number, which docker's users may write as 2.0.
func (c *cpus) Set(s string) error {
	n, err := strconv.ParseFloat(s, 64)
	if err != nil {
		return fmt.Errorf("%q is no number", s)
	}
	if n != float64(int(n)) {
		return fmt.Errorf("%s: a VM has whole CPUs, 1 to %d", s, spec.MaxVCPUs)
	}
	*c = cpus(n)
	return nil
}

// parseMounts tells volumes and directories of the host apart, as docker does: the latter begin with / or a dot. They
// can be written unless :ro is said, as with docker.
func parseMounts(words []string) (volumes []spec.VolumeMount, shares []spec.Share, err error) {
	for _, w := range words {
		if strings.HasPrefix(w, "/") && !strings.Contains(w, ":") {
			return nil, nil, usageError{fmt.Errorf("--volume %s: a volume needs a name, as in NAME:%s: see `drowse volume create`", w, w)}
		}
		if !strings.HasPrefix(w, "/") && !strings.HasPrefix(w, ".") {
			v, err := spec.ParseVolumeMount(w)
			if err != nil {
				return nil, nil, err
			}
			volumes = append(volumes, v)
			continue
		}
		if !strings.HasSuffix(w, ":ro") && !strings.HasSuffix(w, ":rw") {
			w += ":rw"
		}
		sh, err := spec.ParseShare(w)
		if err != nil {
			return nil, nil, err
		}
		shares = append(shares, sh)
	}
	return volumes, shares, nil
}

// parsePublish reads [ADDRESS:]PORT:GUESTPORT[/PROTOCOL].
func parsePublish(word string) (p netpolicy.Published, err error) {
	bad := func(why string) error {
		return fmt.Errorf("--publish %q: %s: use [ADDRESS:]PORT:GUESTPORT, such as 8080:80, 127.0.0.1:8080:80 or 5353:53/udp", word, why)
	}
	rest, protocol, ok := strings.Cut(word, "/")
	p.Protocol = netpolicy.TCP
	if ok {
		if p.Protocol = netpolicy.Protocol(protocol); p.Protocol != netpolicy.TCP && p.Protocol != netpolicy.UDP {
			return p, bad("the protocol is neither tcp nor udp")
		}
	}
	i := strings.LastIndexByte(rest, ':')
	if i < 0 {
		return p, bad("the port of the host is missing, and none is made up")
	}
	guest, host, address := rest[i+1:], rest[:i], "0.0.0.0"
	if j := strings.LastIndexByte(host, ':'); j >= 0 {
		address, host = strings.Trim(host[:j], "[]"), host[j+1:]
	}
	if strings.Contains(guest+host, "-") {
		return p, bad("a range of ports is one --publish for each")
	}
	at, err := netip.ParseAddr(address)
	if err != nil {
		return p, bad("that is no address")
	}
	ports := [2]uint16{}
	for i, s := range []string{host, guest} {
		n, err := strconv.ParseUint(s, 10, 16)
		if err != nil || n == 0 {
			return p, bad("a port is 1 to 65535")
		}
		ports[i] = uint16(n)
	}
	p.Listen, p.Port = netip.AddrPortFrom(at, ports[0]), ports[1]
	return p, nil
}

// checkSpec finds mistakes before anything is pulled or made.
func checkSpec(s spec.VM) error {
	if s.Name == "" {
		s.Name = "x"
	}
	if s.Image == "" {
		s.Image = "x"
	}
	_, err := s.WithDefaults()
	return err
}

// The words of made-up names.
var (
	nameHow = strings.Fields("amber brisk calm clever cosy deep dozy eager early easy fair fluffy gentle grand happy hazy idle jolly keen kind late lazy " +
		"light lucid lunar mellow merry mild misty neat noble placid plush polar quick quiet rapid rested rosy serene silent sleepy slow snug soft " +
		"solar still sunny swift tidy warm wise")
	nameWho = strings.Fields("badger bat bear beaver bison cat cicada crane dormouse dove eagle echidna falcon ferret finch fox frog gecko hare hedgehog " +
		"heron ibex jay koala lark lemur lion lynx marmot mole moth newt okapi otter owl panda pika puffin quail rabbit raven robin seal shrew " +
		"skink sloth snail sparrow squirrel swan tapir toad turtle vole wombat wren")
)

// newName makes up a name that no VM has.
func newName(ctx context.Context, p place) (string, error) {
	for try := range 64 {
		name := nameHow[rand.IntN(len(nameHow))] + "-" + nameWho[rand.IntN(len(nameWho))]
		if try >= 16 { // most are taken
			name += "-" + strconv.Itoa(rand.IntN(10_000))
		}
		switch _, err := p.Get(ctx, name); {
		case errors.Is(err, spec.ErrNotFound):
			return name, nil
		case err != nil && try == 63:
			return "", err
		}
	}
	return "", errors.New("all names that were made up are taken: give one by --name")
}

func firstOf(list []string) string {
	if len(list) == 0 {
		return ""
	}
	return list[0]
}
