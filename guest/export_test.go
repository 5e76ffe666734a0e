package guest

import "time"

// SetCloseTime bounds how long Close of a listener waits for the guest.
func SetCloseTime(l *Listener, d time.Duration) { l.closeTime = d }

// CheckChanges checks a list of changes from a guest.
var CheckChanges = changes
