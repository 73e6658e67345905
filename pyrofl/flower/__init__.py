"""The two halves of a round carried by Flower: a server and sites on machines of their own.

    pyrofl flower new DIR                        a project folder, which server and sites have
    pyrofl flower up DIR --sites 3               everything on this machine, to try it
    pyrofl flower serve DIR --host 0.0.0.0 ...   at the server
    pyrofl flower join HOST:PORT --data ...      at every site
    pyrofl flower predict STATE --rows ...       at a site, from the state that its clients keep

Flower brings the messages and knows the nodes; what is in them is `pyrofl.Server`'s and
`pyrofl.Client`'s. A site is called by its name and never by a number of Flower's, which changes
when a node starts anew. Every message starts a process at the site, so one message has the question
about the last round and the order of the next, of all methods of the project.

`project` and `rows` define the study and the rows of a site, `records` the form of messages, `site`
and `coordinator` what both sides do, `apps` how Flower calls them, `processes` and `commands` start
Flower's programs.
Only `apps` and `processes` need Flower; nothing of it is imported before.
"""
