package guest

import (
	"slices"
	"time"
)

// SetCloseTime bounds how long Close of a listener waits for the guest.
func SetCloseTime(l *Listener, d time.Duration) { l.closeTime = d }

// CheckChanges checks a list of changes from a guest.
var CheckChanges = changes

// Cut reports whether the kept connections of a client have all ended.
func Cut(c *Client) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !slices.ContainsFunc(c.idle, func(ch *channel) bool { return !ch.ended.Load() })
}
