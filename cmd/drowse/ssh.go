//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/sshd"
	"github.com/drowse-vm/drowse/sandbox"
)

// sshHostPrefix begins ssh's host names of VMs.
const sshHostPrefix = "drowse-"

// sshDir is where a store keeps the host key.
func sshDir(s *sandbox.Host) string { return filepath.Join(s.State.Dir(), "ssh") }

// sshOption is an option of ssh_config(5).
type sshOption struct{ key, value string }

// sshOptions returns the options with which OpenSSH's client reaches a VM. Values are quoted for its configuration
// file.
func (a *app) sshOptions(s *sandbox.Host, name string) ([]sshOption, error) {
	_, known, err := sshd.LoadHostKey(sshDir(s))
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("finding this program: %w", err)
	}
	dir, err := filepath.Abs(s.State.Dir())
	if err != nil {
		return nil, err
	}
	if known, err = filepath.Abs(known); err != nil {
		return nil, err
	}
	for _, path := range []string{self, dir, known} {
		if strings.ContainsAny(path, "\"\n") {
			return nil, fmt.Errorf("%q cannot be named in ssh's configuration", path)
		}
	}
	proxy := proxyCommand(self, dir, name, os.Getenv("DROWSE_AGENT"))
	return []sshOption{
		{"User", "root"},
		{"HostKeyAlias", sshd.HostKeyAlias},
		{"UserKnownHostsFile", `"` + strings.ReplaceAll(known, "%", "%%") + `"`},
		{"GlobalKnownHostsFile", "/dev/null"},
		{"StrictHostKeyChecking", "yes"},
		{"UpdateHostKeys", "no"},
		{"CheckHostIP", "no"},
		// Only the host's key is checked: users need not authenticate.
		{"PreferredAuthentications", "none"},
		{"ProxyCommand", strings.ReplaceAll(proxy, "%", "%%")},
	}, nil
}

// proxyCommand returns the ProxyCommand. The user's shell runs it with "exec " in front: ssh_config(5). A wake
// needs agent.
func proxyCommand(self, state, name, agent string) string {
	c := shellQuote(self) + " --state " + shellQuote(state) + " ssh-proxy " + shellQuote(name)
	if agent != "" {
		c = "env DROWSE_AGENT=" + shellQuote(agent) + " " + c
	}
	return c
}

func (a *app) sshCommand() *cobra.Command {
	var user string
	cmd := &cobra.Command{
		Use:   "ssh [-l USER] NAME [-- COMMAND [ARG...]]",
		Short: "Log in to a VM with OpenSSH",
		Long: `Log in to a VM with the ssh client of this host. A sleeping VM is woken. The VM needs no SSH
server. For scp, sftp, rsync and options of ssh, see ssh-config.`,
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeVM,
		RunE: a.onHost(func(_ *cobra.Command, args []string, s *sandbox.Host) error {
			if _, err := s.State.Get(args[0]); err != nil {
				return err
			}
			options, err := a.sshOptions(s, args[0])
			if err != nil {
				return err
			}
			path, err := exec.LookPath("ssh")
			if err != nil {
				return fmt.Errorf("%w: install OpenSSH's client (openssh-client), or use `drowse exec -it`", err)
			}
			argv := []string{"ssh"}
			for _, o := range options {
				if o.key == "User" && user != "" {
					o.value = user
				}
				argv = append(argv, "-o", o.key+" "+o.value)
			}
			argv = append(argv, "--", sshHostPrefix+args[0])
			// After "--" ssh takes nothing as its own option, the command included.
			argv = append(argv, afterDashes(args[1:])...)
			return fmt.Errorf("starting ssh: %w", syscall.Exec(path, argv, os.Environ()))
		}),
	}
	f := cmd.Flags()
	f.SetInterspersed(false)
	f.StringVarP(&user, "user", "l", "", "user in the VM (default root)")
	return cmd
}

func (a *app) sshConfigCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "ssh-config [NAME...]",
		Short: "Print an OpenSSH client configuration for VMs",
		Long: `Print an OpenSSH client configuration for all VMs, or those named, with the host names
"drowse-NAME". Append it to ~/.ssh/config, or use it as a file:

    drowse ssh-config > drowse.conf
    scp -F drowse.conf file drowse-dev:
    rsync -e "ssh -F drowse.conf" -a dir drowse-dev:`,
		ValidArgsFunction: a.completeVM,
		RunE: a.onHost(func(_ *cobra.Command, names []string, s *sandbox.Host) error {
			if len(names) == 0 {
				all, err := s.State.List()
				if err != nil {
					return err
				}
				for _, r := range all {
					names = append(names, r.Spec.Name)
				}
			}
			type host struct {
				Host    string            `json:"host"`
				Options map[string]string `json:"options"`
			}
			hosts := make([]host, 0, len(names))
			var text strings.Builder
			for _, name := range names {
				if _, err := s.State.Get(name); err != nil {
					return err
				}
				options, err := a.sshOptions(s, name)
				if err != nil {
					return err
				}
				h := host{sshHostPrefix + name, make(map[string]string)}
				fmt.Fprintf(&text, "Host %s\n", h.Host)
				for _, o := range options {
					h.Options[o.key] = o.value
					fmt.Fprintf(&text, "    %s %s\n", o.key, o.value)
				}
				hosts = append(hosts, h)
			}
			return a.print(hosts, func(w io.Writer) { fmt.Fprint(w, text.String()) })
		}),
	}
}

func (a *app) sshProxyCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "ssh-proxy NAME",
		Short: "Serve SSH for a VM on stdin and stdout: the ProxyCommand of ssh-config",
		Args:  cobra.ExactArgs(1), ValidArgsFunction: a.completeVM,
		RunE: a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
			key, _, err := sshd.LoadHostKey(sshDir(s))
			if err != nil {
				return err
			}
			d := a.newAgentAccess(s, args[0])
			defer d.close()
			// Now, so that ssh shows the error.
			if _, err := d.open(cmd.Context()); err != nil {
				return err
			}
			env, err := s.Sandbox(args[0]).ProxyEnvironment()
			if err != nil {
				return err
			}
			server := &sshd.Server{HostKey: key, Env: env, Use: func(ctx context.Context, f func(*guest.Client) error) error { return d.use(ctx, f) }}
			return followed(true, server.Serve(cmd.Context(), &stdio{in: polled(os.Stdin), out: polled(os.Stdout)}))
		}),
	}
}

// polled returns another file for a pipe or a socket. Closing it ends its reads and writes. It returns other files
// unchanged, such as a terminal that programs share.
func polled(f *os.File) *os.File {
	fi, err := f.Stat()
	if err != nil || fi.Mode()&(os.ModeNamedPipe|os.ModeSocket) == 0 {
		return f
	}
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return f
	}
	if unix.SetNonblock(fd, true) != nil {
		unix.Close(fd)
		return f
	}
	return os.NewFile(uintptr(fd), f.Name())
}

// stdio is standard input and output as a connection.
type stdio struct{ in, out *os.File }

func (c *stdio) Read(p []byte) (int, error)  { return c.in.Read(p) }
func (c *stdio) Write(p []byte) (int, error) { return c.out.Write(p) }

// Close implements net.Conn. It ends a blocked Read if stdin is polled.
func (c *stdio) Close() error { return errors.Join(c.in.Close(), c.out.Close()) }

type stdioAddr struct{}

func (stdioAddr) Network() string { return "stdio" }
func (stdioAddr) String() string  { return "stdio" }

func (c *stdio) LocalAddr() net.Addr                { return stdioAddr{} }
func (c *stdio) RemoteAddr() net.Addr               { return stdioAddr{} }
func (c *stdio) SetDeadline(t time.Time) error      { return c.in.SetDeadline(t) }
func (c *stdio) SetReadDeadline(t time.Time) error  { return c.in.SetReadDeadline(t) }
func (c *stdio) SetWriteDeadline(t time.Time) error { return c.out.SetWriteDeadline(t) }
