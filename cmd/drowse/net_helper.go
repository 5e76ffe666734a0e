//go:build linux

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/coreos/go-systemd/v22/activation"
	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/network"
)

// maximumPath is the file with what an administrator denies users' VMs.
const maximumPath = "/etc/drowse/net-policy.yaml"

func (a *app) netHelperCommand() *cobra.Command {
	var listen, maximum string
	h := network.Helper{Log: a.log}
	cmd := &cobra.Command{
		Use: "helper", Short: "Let users without root run VMs with a network", Args: cobra.NoArgs,
		Long: `Let users without root run VMs with a network, usually under systemd: copy
contrib/systemd/drowse-net.service and drowse-net.socket to /etc/systemd/system, then "systemctl
enable --now drowse-net.socket". Users of group kvm may connect.

The helper makes the TAP device of a VM, gives it an address, and puts the user's policy on it.
The rules of ` + maximumPath + `, a policy file whose rules deny, come before those
of each policy. Without that file, metadata services are denied. A network ends with the process
that asked for it, or with the helper. Forwarding is the administrator's: "drowse net setup
--forward".`,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if h.Maximum, err = network.Maximum(maximum); err != nil {
				return err
			}
			h.Log = a.log
			ln, err := helperListener(listen)
			if err != nil {
				return err
			}
			defer ln.Close()
			return h.Serve(cmd.Context(), ln, func() { a.notify(daemon.SdNotifyReady) })
		},
	}
	f := cmd.Flags()
	f.StringVar(&listen, "listen", "", "socket to make, for root alone; default: systemd's, or "+network.HelperSocket)
	f.StringVar(&maximum, "maximum", maximumPath, "policy file with what is denied to all")
	f.IntVar(&h.UserLinks, "links", network.DefaultUserLinks, "networks that one user may have at once")
	return cmd
}

// helperListener returns systemd's socket, or makes one.
func helperListener(path string) (*net.UnixListener, error) {
	all, err := activation.Listeners()
	if err != nil {
		return nil, fmt.Errorf("taking sockets from systemd: %w", err)
	}
	if len(all) == 1 && path == "" {
		u, ok := all[0].(*net.UnixListener)
		if ok && u.Addr().Network() == "unixpacket" {
			u.SetUnlinkOnClose(false) // systemd keeps listening
			return u, nil
		}
	}
	if len(all) > 0 {
		for _, l := range all {
			err = errors.Join(err, l.Close())
		}
		return nil, usageError{errors.Join(errors.New("systemd has opened other sockets than one ListenSequentialPacket=/PATH"), err)}
	}
	path = cmp.Or(path, network.HelperSocket)
	if c, err := new(net.Dialer).DialContext(context.Background(), "unixpacket", path); err == nil {
		return nil, errors.Join(fmt.Errorf("another helper listens at %s", path), c.Close())
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("removing the socket of an ended helper: %w", err)
	}
	ln, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return nil, fmt.Errorf("listening for users: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(err, ln.Close())
	}
	return ln, nil
}
