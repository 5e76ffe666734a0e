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

// activated are the sockets that systemd has opened (sd_listen_fds(3)); nil if it has none. Only Unix sockets are
// taken: who connects to them is asked of the kernel, while TCP has to be checked for tokens and TLS, as --listen does.
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
		u.SetUnlinkOnClose(false) // systemd goes on listening
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

// notify tells systemd something (sd_notify(3)), if it wants to know.
func (a *app) notify(state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		a.log.Warn("telling systemd", "state", state, "error", err)
	}
}

// watchdog tells systemd again and again that this process works, while it does, until ctx ends. Nothing happens if
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
