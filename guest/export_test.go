package guest

// CheckChanges is what takes a list of changes from a guest.
var CheckChanges = changes
