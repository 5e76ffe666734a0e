//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/identity"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/gateway"
	"github.com/drowse-vm/drowse/sandbox/supervisor"
)

// apiFlags say how to serve the API.
type apiFlags struct {
	off                              bool
	tcp                              api.TCP
	tokens, cert, key, ids, clientCA string
	hosts                            []string
	private                          bool
}

func (f *apiFlags) add(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.BoolVar(&f.off, "no-api", false, "do not serve the HTTP API, not even on "+api.SocketFile+" in the state directory")
	fl.StringVar(&f.tcp.Address, "listen", "", "also serve the HTTP API on this HOST:PORT, to callers with a token")
	fl.StringVar(&f.tokens, "token-file", "", "file with tokens (default "+tokens.File+" in the state directory; see \"drowse token\")")
	fl.StringVar(&f.cert, "tls-cert", "", "certificate for --listen, PEM; read again when it changes")
	fl.StringVar(&f.key, "tls-key", "", "key of the certificate, PEM")
	fl.BoolVar(&f.tcp.Plain, "no-tls", false, "allow --listen without TLS on an address that others reach, because something else encrypts")
	fl.StringVar(&f.ids, "identities", "", "file with OpenID Connect issuers, and what their and certificates' identities may do (docs/guides/api.md)")
	fl.StringVar(&f.clientCA, "client-ca", "", "authorities of client certificates, PEM, for --listen and --e2b with TLS; read again when it changes")
	fl.BoolVar(&f.private, "owners-private", false, "policies of callers with an owner may open private addresses and this host")
	fl.StringArrayVar(&f.hosts, "host", nil, "host name of this server, besides addresses and localhost; repeatable")
}

func (f *apiFlags) check(wire *e2bFlags) error {
	if f.tcp.Address == "" && (f.cert != "" || f.key != "" || f.tcp.Plain || f.tokens != "") {
		return usageError{errors.New("--token-file, --tls-cert, --tls-key and --no-tls go with --listen")}
	}
	if (f.cert == "") != (f.key == "") {
		return usageError{errors.New("--tls-cert goes with --tls-key")}
	}
	if f.ids != "" && f.tcp.Address == "" && wire.listen == "" {
		return usageError{errors.New("--identities goes with --listen or --e2b")}
	}
	if f.clientCA != "" && (f.ids == "" || f.cert == "" && wire.cert == "") {
		return usageError{errors.New("--client-ca goes with --identities, which says what certificates may do, and with --tls-cert or --e2b-cert")}
	}
	if f.off && (f.tcp.Address != "" || len(f.hosts) > 0) {
		return usageError{errors.New("--listen and --host do not go with --no-api")}
	}
	return nil
}

// tokensOf returns the tokens in a file, or those of the state directory.
func tokensOf(path string, s *sandbox.Host) *tokens.Store {
	if path == "" {
		path = filepath.Join(s.State.Dir(), tokens.File)
	}
	return tokens.Open(path)
}

// identities returns the callers for whom others vouch; nil if there is no file of them.
func (f *apiFlags) identities(a *app) (*identity.Store, error) {
	if f.ids == "" {
		return nil, nil
	}
	s, err := identity.Open(identity.Options{File: f.ids, ClientCA: f.clientCA, Log: a.log})
	if err != nil {
		return nil, usageError{err}
	}
	return s, nil
}

// listeners returns the listeners of the API.
func (f *apiFlags) listeners(a *app, s *sandbox.Host) (out []net.Listener, err error) {
	defer func() {
		if err != nil {
			for _, l := range out {
				l.Close()
			}
		}
	}()
	if f.off {
		return nil, nil
	}
	if out, err = activated(); err != nil {
		return out, err
	}
	if len(out) == 0 {
		l, err := api.ListenUnix(filepath.Join(s.State.Dir(), api.SocketFile))
		if err != nil {
			return out, err
		}
		out = append(out, l)
	}
	if f.tcp.Address != "" {
		if f.cert != "" {
			if f.tcp.TLS, err = gateway.Certificates(f.cert, f.key, a.log); err != nil {
				return out, usageError{err}
			}
		}
		l, err := f.tcp.Listen(tokensOf(f.tokens, s))
		if errors.Is(err, api.ErrListen) || errors.Is(err, tokens.ErrTokens) {
			err = usageError{err}
		}
		if err != nil {
			return out, err
		}
		out = append(out, l)
	}
	return out, nil
}

// readiness returns the checks of /readyz: what the host needs for a wake.
func readiness(s *sandbox.Host) []api.Check {
	return []api.Check{
		{Name: "kvm", Do: func(context.Context) error {
			f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
			if err != nil {
				return fmt.Errorf("%w: see `drowse doctor`", err)
			}
			return f.Close()
		}},
		{Name: "store", Do: func(context.Context) error { return writable(s.State.Dir()) }},
		{Name: "bpffs", Do: func(context.Context) error {
			if !mayHaveNetworks() {
				return nil // no VM needs it
			}
			var st unix.Statfs_t
			if err := unix.Statfs(bpffs, &st); err != nil {
				return fmt.Errorf("%s: %w", bpffs, err)
			}
			if st.Type != unix.BPF_FS_MAGIC && os.Geteuid() != 0 {
				// Root's first VM with a network mounts bpffs.
				return fmt.Errorf("there is no bpffs at %s: mount it with `mount -t bpf bpf %s`", bpffs, bpffs)
			}
			return nil
		}},
	}
}

// mayHaveNetworks reports whether this process may make TAP devices.
func mayHaveNetworks() bool {
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	err := unix.Capget(&head, &caps[0])
	return err != nil || caps[0].Effective&(1<<unix.CAP_NET_ADMIN) != 0
}

// roundTime is how long one round of the supervisor may take before it counts as stuck. It makes a round twice a
// second, but looking at thousands of VMs on a busy disk takes seconds.
const roundTime = 30 * time.Second

// goesRound returns the check of /healthz.
func goesRound(c *supervisor.Counters, begun time.Time) api.Check {
	return api.Check{Name: "supervisor", Do: func(context.Context) error {
		last := c.LastRound()
		if last.IsZero() {
			last = begun
		}
		if ago := time.Since(last); ago > roundTime {
			return fmt.Errorf("it has not gone round its loop for %v", ago.Round(time.Second))
		}
		return nil
	}}
}

// bpffs is where the networks' BPF programs are pinned.
const bpffs = "/sys/fs/bpf"

// writable checks that files can be made in a directory.
func writable(dir string) error {
	f, err := os.CreateTemp(dir, ".ready.*")
	if err != nil {
		return err
	}
	_, err = f.WriteString("x")
	return errors.Join(err, f.Close(), os.Remove(f.Name()))
}
