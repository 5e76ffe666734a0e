//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/coreos/go-systemd/v22/activation"
	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/drowse-vm/drowse/sandbox/api"
)

// activated returns the sockets that systemd opened (sd_listen_fds(3)), or nil. It takes only Unix sockets, whose
// peers the kernel identifies. TCP needs the checks of tokens and TLS that --listen does.
func activated() ([]net.Listener, error) {
	all, err := activation.Listeners()
	if err != nil {
		return nil, fmt.Errorf("taking sockets from systemd: %w", err)
	}
	var out []net.Listener
	bad := false
	for _, l := range all {
		u, ok := l.(*net.UnixListener)
		if !ok {
			bad = true
			continue
		}
		u.SetUnlinkOnClose(false) // systemd keeps listening
		out = append(out, u)
	}
	if bad {
		for _, l := range all {
			if l != nil {
				l.Close()
			}
		}
		return nil, usageError{errors.New("systemd has opened a socket that is no Unix stream socket: use ListenStream=/PATH in the socket unit, and --listen for TCP")}
	}
	return out, nil
}

// notify sends systemd a state (sd_notify(3)), if it asked for it.
func (a *app) notify(state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		a.log.Warn("telling systemd", "state", state, "error", err)
	}
}

// watchdog tells systemd regularly that this process works, as long as it does, until ctx ends. It does nothing if
// systemd does not watch.
func (a *app) watchdog(ctx context.Context, works api.Check) error {
	every, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		return fmt.Errorf("reading how systemd watches: %w", err)
	}
	if every == 0 {
		return nil
	}
	tick := time.NewTicker(every / 3)
	defer tick.Stop()
	for {
		if err := works.Do(ctx); err != nil {
			a.log.Error("this process does not work as it should, and systemd is not told that it does", "error", err)
		} else {
			a.notify(daemon.SdNotifyWatchdog)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}
