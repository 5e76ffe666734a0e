// Lets Node find the hosts of sandboxes, as a wildcard of a user's DNS would.
import dns from 'node:dns'

const { lookup } = dns
dns.lookup = (name, opts, done) => lookup(name.endsWith('.' + process.env.DROWSE_DOMAIN) ? '127.0.0.1' : name, opts, done)
