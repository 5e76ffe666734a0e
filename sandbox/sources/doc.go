// Package sources has the sources that secrets of sandboxes come from: files, commands, variables and systemd
// credentials of the host, which the operator has named. A record keeps the name alone.
package sources
